"""Four ranks on gloo that run attention and gathers over subgroups; what they return is for the tests to judge."""

import itertools
from types import SimpleNamespace

import torch
from torch import distributed

from production.errors import BatchRefused
from production.model.device import attention_share
from production.model.device.attention import SegmentAttention
from production.model.device.attention_kernels import TILED
from production.parallel.context_parallel import select, shard_index
from production.parallel.gather import gather_ranks

SIZE = 4
GROUPS = {2: ((0, 1), (2, 3)), 3: ((0, 1, 2),), 4: ((0, 1, 2, 3),)}
UNITS = ([1, 3, 2], [2, 0, 2, 2, 5, 0], [7], [1, 1, 1, 1, 0, 9, 4])
"""Segment lengths in units of 2·cp tokens: several, empty ones, one alone, runs of equal ones."""
HEADS = ((2, 2, 8, 8), (4, 2, 8, 8), (6, 1, 4, 4), (4, 4, 8, 4))
"""(h, h_kv, d, d_v)."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def cases():
    """(cp, segment lengths, heads, dtype, kernel) of each attention case under context parallelism."""
    made = []
    for number, (cp, units, dtype) in enumerate(itertools.product(GROUPS, UNITS, DTYPES)):
        lengths = [2 * cp * unit for unit in units]
        made.append((cp, lengths, HEADS[number % len(HEADS)], dtype, "tiled" if number % 5 == 4 else "fused"))
    return made


def inputs(lengths, heads, dtype, seed):
    """query, key, value and the output's gradient of the whole row."""
    count, kv_count, width, value_width = heads
    made = torch.Generator().manual_seed(seed)
    shapes = ((count, width), (kv_count, width), (kv_count, value_width), (count, value_width))
    return [torch.randn(sum(lengths), *shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def boundaries(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def params(cu_seqlens, **fields):
    """What the attention reads of megatron-core's PackedSeqParams, which would take seconds to import in each process."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    read = dict.fromkeys(names, cu_seqlens) | {"qkv_format": "thd", "local_cp_size": None, "cp_group": None}
    return SimpleNamespace(**(read | fields))


def config(**fields):
    """What the attention reads of a TransformerConfig."""
    read = {
        "attention_dropout": 0.0,
        "window_size": None,
        "softmax_type": "vanilla",
        "apply_query_key_layer_scaling": False,
        "qk_clip": False,
        "log_max_attention_logit": False,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**(read | fields))


def module(group=None, **fields):
    return SegmentAttention(
        config=config(),
        layer_number=1,
        attn_mask_type="causal",
        attention_type="self",
        **{"cp_comm_type": None, "softmax_scale": None, "pg_collection": SimpleNamespace(cp=group)} | fields,
    )


def run(attention, lengths, tensors):
    """Output [t, h, d_v] and the gradients of query, key, value, of one rank's share."""
    query, key, value, upper = tensors
    leaves = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    found = attention(*leaves, None, packed_seq_params=params(boundaries(lengths)))
    found.backward(upper.flatten(1))
    return [found.detach().view(upper.shape), *(each.grad for each in leaves)]


def _attention(groups):
    results = {}
    for number, (cp, lengths, heads, dtype, kernel) in enumerate(cases()):
        if cp not in groups:
            continue
        attention_share.kernel_for = {"tiled": lambda _: TILED, "fused": KERNEL_FOR}[kernel]
        index = shard_index(boundaries(lengths), distributed.get_rank(groups[cp]), cp)
        share = [each[index] for each in inputs(lengths, heads, dtype, number)]
        attention = module(groups[cp], softmax_scale=0.7 if number % 2 else None)
        results[f"attention {number}"] = run(attention, lengths, share)
        if number % 7 == 0:
            results[f"again {number}"] = run(attention, lengths, share)
        # All but the second segment poisoned: what is left of it must be what it was.
        if kernel == "fused" and lengths[1:2] and lengths[1]:
            owner = torch.bucketize(index, boundaries(lengths)[1:].long(), right=True)
            poisoned = [each.masked_fill((owner != 1)[:, None, None], torch.nan) for each in share]
            results[f"poisoned {number}"] = [each[owner == 1] for each in run(attention, lengths, poisoned)]
            results[f"unpoisoned {number}"] = [each[owner == 1] for each in results[f"attention {number}"]]
    attention_share.kernel_for = KERNEL_FOR
    # A cut that would lose tokens is refused by every rank before a message is sent.
    try:
        run(module(groups[4]), [8, 12, 12], [each[:8] for each in inputs([32], HEADS[0], torch.float64, 0)])
    except BatchRefused as refused:
        results["refused"] = [refused.kind, refused.what]
    return results


def _gathers(rank, groups):
    results = {}
    sent = _count_messages()
    for cp, group in groups.items():
        lengths, me = [2 * cp * unit for unit in (1, 0, 4, 2)], distributed.get_rank(group)
        cu, total = boundaries(lengths), sum(lengths)
        values = torch.arange(3 * total, dtype=torch.float64).view(total, 3)
        for layout in ("zigzag", "contiguous"):
            index = shard_index(cu, me, cp, layout=layout)
            for gradient in ("sum", "own"):
                share = values[index].requires_grad_()
                sent.clear()
                whole = gather_ranks(share, cu, group, layout=layout, gradient=gradient)
                forward = len(sent)
                # "sum": each rank's loss weighs the row in its own way; "own": all ranks weigh it alike.
                weight = torch.cos(values + (10 * me if gradient == "sum" else 0))
                (whole * weight).sum().backward()
                results[f"{cp} {layout} {gradient}"] = [whole.detach(), share.grad, forward, len(sent) - forward]
        index = shard_index(cu, me, cp)
        log_probabilities = torch.stack([values[:, 0], -values[:, 0]])[:, index].requires_grad_()
        whole = gather_ranks(log_probabilities, cu, group, dim=1, gradient="own")
        (whole * whole).sum().backward()
        results[f"{cp} dim"] = [whole.detach(), log_probabilities.grad, log_probabilities.detach()]
        rows = torch.arange(2 * total).view(2, total)
        two = torch.cat([cu, cu[1:] + total])
        share = select(rows, shard_index(two, me, cp, rows=2)).flatten()
        results[f"{cp} rows"] = [gather_ranks(share, two, group, rows=2, gradient="own").view(2, total)]
    # In bfloat16 256 + 1 is 256: added there, three ones would be lost.
    share = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    whole = gather_ranks(share, boundaries([8]), groups[4], gradient="sum")
    whole.backward(torch.full_like(whole, 1.0 if rank else 256.0))
    results["half precision"] = [share.grad]
    return results


def _count_messages():
    """A list that grows by one with each message sent in this process."""
    sent = []
    names = (
        "all_gather_single",
        "all_gather_into_tensor",
        "all_gather",
        "all_to_all_single",
        "all_reduce",
        "broadcast",
    )
    for name in (name for name in names if hasattr(distributed, name)):
        call = getattr(distributed, name)

        def counted(*args, _call=call, **kwargs):
            sent.append(None)
            return _call(*args, **kwargs)

        setattr(distributed, name, counted)
    return sent


def found(_payload, worker):
    """All that a rank's attention and gathers give."""
    groups = {}
    for cp, ranks in GROUPS.items():
        for each in ranks:
            group = distributed.new_group(each)
            if worker.rank in each:
                groups[cp] = group
    return _attention(groups) | _gathers(worker.rank, groups)


KERNEL_FOR = attention_share.kernel_for
