"""Runs megatron-core's models on one CPU rank of a world: a process of its own, since the CPU shim is entered there."""

import torch

from production.model.device.shim import cpu_shim
from production.model.model import ModelSettings, build_model
from production.parallel.sizes import ParallelSizes, parallel


def run_all(cases, _worker):
    """All cases, in one parallel state of one rank."""
    with cpu_shim(), parallel(ParallelSizes()):
        return [run(case) for case in cases]


def run(case):
    """One model on one row: its weights, token losses of every depth, gradients of the training loss."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe import moe_logging
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # both belong to the process and keep the first model's number of layers
    moe_logging.destroy_moe_metrics_tracker()
    torch.manual_seed(case["seed"])
    transformer = dict(case["settings"]["transformer"])
    if "activation_func" in transformer:
        transformer["activation_func"] = getattr(torch.nn.functional, transformer["activation_func"])
    model = build_model(ModelSettings(**{**case["settings"], "transformer": transformer}), ParallelSizes())
    for weight in model.parameters():
        if weight.dim() == 1:  # so that no bias is 0 and no gain 1
            weight.data += 0.1 * torch.randn_like(weight)
    losses = []
    upstream = model.compute_language_model_loss

    def watched(labels, logits):
        losses.append(upstream(labels, logits))
        return losses[-1]

    model.compute_language_model_loss = watched
    cu, ids = case["cu_seqlens"], case["input_ids"][None]
    longest = int((cu[1:] - cu[:-1]).max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    mask = case["token_mask"][None]
    # Positions that no row has: the model must not look at them.
    positions = torch.full_like(ids, 7)
    own = model(ids, positions, None, labels=case["target_ids"][None], packed_seq_params=packed, loss_mask=mask)
    (own * mask).sum().backward()
    return {
        "weights": {name: weight.detach() for name, weight in model.named_parameters()},
        "gradients": {name: weight.grad for name, weight in model.named_parameters()},
        "tokens": [each.detach()[0] for each in [losses[-1], *losses[:-1]]],
    }
