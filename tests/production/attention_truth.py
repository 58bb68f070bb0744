"""Attention within segments by dense masked softmax, and how far from it another may be: by what rounding can do, or twice what it does."""

import numpy as np
import torch

NAMES = ("output", "query", "key", "value")


def mask_of(lengths):
    """[T, T]: who sees whom."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    return (segment[:, None] == segment) & np.tri(len(segment), dtype=bool)


def truth(lengths, tensors, scale):
    """Output and gradients by dense masked softmax and its derivative, and what rounding may do to each value.

    With u the unit of the tensors' precision, a score is off by at most (d + 1)·u·Σ|q·k|·scale, a weight, relatively, by that
    and what its row's log-sum-exp is off, each sum over n terms by n·u; all of it to first order, doubled. exp is taken
    to be good to 32 u. The bound of a value is that number times the same computation on absolute values.
    """
    wide = np.longdouble if tensors[0].dtype == torch.float64 else np.float64
    query, key, value, upper = (each.double().numpy().astype(wide).transpose(1, 0, 2) for each in tensors)
    group = len(query) // len(key)
    keys, values = (each.repeat(group, axis=0) for each in (key, value))
    mask = mask_of(lengths)
    scores = np.where(mask, query @ keys.transpose(0, 2, 1) * scale, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    sums = weights.sum(-1, keepdims=True)
    weights /= sums

    def gradients(query, keys, values, upper, sign):
        upper_values = upper @ values.transpose(0, 2, 1)
        inner = weights * (upper_values - sign * (weights * upper_values).sum(-1, keepdims=True)) * scale
        per_head = [inner.transpose(0, 2, 1) @ query, weights.transpose(0, 2, 1) @ upper]
        per_group = [each.reshape(-1, group, *each.shape[1:]).sum(1) for each in per_head]
        return [each.transpose(1, 0, 2) for each in (weights @ values, inner @ keys, *per_group)]

    exact = gradients(query, keys, values, upper, 1)
    magnitudes = gradients(*(np.abs(each) for each in (query, keys, values, upper)), -1)
    products = np.where(mask, np.abs(query) @ np.abs(keys).transpose(0, 2, 1) * abs(scale), 0).max()
    log_sums = np.abs(highest + np.log(sums)).max()
    unit = torch.finfo(tensors[0].dtype).eps / 2
    terms = 2 * (query.shape[-1] + 1) * products + log_sums + value.shape[-1] + 2 * group * max(lengths) + 32
    return exact, [2 * unit * terms * each for each in magnitudes]


def dense(lengths, tensors, scale):
    """Output and gradients by dense masked softmax, in the tensors' own precision, with torch's autograd."""
    query, key, value = (each.detach().clone().requires_grad_() for each in tensors[:3])
    group = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    weights = scores.masked_fill(~torch.from_numpy(mask_of(lengths)), -torch.inf).softmax(-1)
    output = torch.einsum("hqk,khd->qhd", weights, values)
    output.backward(tensors[3])
    return [output.detach(), query.grad, key.grad, value.grad]


def assert_exact(found, lengths, tensors, scale):
    exact, bounds = truth(lengths, tensors, scale)
    plain = dense(lengths, tensors, scale)
    for name, ours, bound, theirs, right in zip(NAMES, found, bounds, plain, exact, strict=True):
        assert ours.dtype == tensors[0].dtype
        assert ours.shape == right.shape
        off = np.abs(ours.double().numpy() - right)
        if ours.dtype != torch.bfloat16:
            assert (off <= bound).all(), name
            continue
        # Where plain arithmetic happens to be exact (a token that sees itself alone), one rounding is still allowed.
        twice = 2 * np.linalg.norm(theirs.double().numpy() - right)
        assert np.linalg.norm(off) <= max(twice, torch.finfo(ours.dtype).eps * np.linalg.norm(right)), name
