"""verl's Megatron engine and `sft_loss` as a packing function: a micro-batch becomes one row, and the engine rolls the labels.

Rows are padded for context parallelism, and have no other length: what one call gets is one micro-batch. `mask` is what `sft_loss`
weighs a token's log probability by, read from the gradient of the loss; a label that it does not weigh is told as -100. The whole row
is what one rank gets at tensor parallel size 2·cp, where the engine pads by as much. megatron-core's group sizes are stand-ins: no
process group is there. Needs verl 0.9.1 (Python 3.12), megatron-core, tensordict and ray:
`packproof conformance --subject exec:"python verl_engine.py"`.
`make conformance PEERS=verl` builds that environment, and examples/adapters/peers.toml says what pip installs.
"""

from unittest import mock

CONVENTIONS = {"row_length": "ragged", "pad_label": "ignore", "pad_positions": "zero"}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Lay all conversations of the call end to end in one row, whatever `pack_length` is; padding is the id 0."""
    import torch  # noqa: PLC0415 - seconds, and only where a row is built

    kept = [each for each in conversations if each["tokens"]]
    tokens = _nested(torch, [each["tokens"] for each in kept])
    mask = _mask(torch, _nested(torch, [list(map(float, each["trained"])) for each in kept]))
    size = context_parallel_size
    row, boundaries = _rank(torch, tokens, mask, tp=2 * size if size > 1 else 1)
    if size > 1:
        row["shards"] = [_rank(torch, tokens, mask, cp=size, rank=rank)[0] for rank in range(size)]
        for shard in row["shards"]:
            del shard["position_ids"]  # those of padding differ from the whole row's, and nothing looks at them
    return [{**row, "cu_seqlens": boundaries}]


def _nested(torch, rows):
    return torch.nested.nested_tensor([torch.tensor(each) for each in rows], layout=torch.jagged)


def _mask(torch, trained):
    """Return the weight of each log probability in `sft_loss`, in the layout of `trained`: minus its gradient."""
    from verl.workers.utils.losses import sft_loss  # noqa: PLC0415

    values = torch.zeros(trained.values().shape, requires_grad=True)
    log_probs = torch.nested.nested_tensor_from_jagged(values, trained.offsets())
    batch = {"loss_mask": trained, "dp_size": 1, "batch_num_tokens": 1}
    loss, _ = sft_loss(None, {"log_probs": log_probs}, batch)
    (gradient,) = torch.autograd.grad(loss, values)
    return torch.nested.nested_tensor_from_jagged(-gradient, trained.offsets())


def _rank(torch, tokens, mask, tp=1, cp=1, rank=0):
    """Return what a rank of these sizes gets, and the boundaries of the whole row."""
    from verl.models.mcore import util  # noqa: PLC0415

    groups = {
        "get_tensor_model_parallel_world_size": tp,
        "get_context_parallel_world_size": cp,
        "get_context_parallel_rank": rank,
    }
    with mock.patch.multiple(util.mpu, **{name: lambda size=size: size for name, size in groups.items()}):
        ids, params, positions = util.preprocess_thd_engine(tokens)
        labels = util.preprocess_thd_engine(tokens, need_roll=True)[0]
        weights = util.preprocess_thd_engine(mask)[0]
    trains = weights[0] != 0
    row = {"input_ids": ids, "labels": torch.where(trains, labels, -100), "mask": trains, "position_ids": positions}
    return {name: value.reshape(-1) for name, value in row.items()}, params.cu_seqlens_q


if __name__ == "__main__":
    from packproof_subject import serve

    serve(pack=pack, conventions=CONVENTIONS, name="verl")
