"""Four gloo ranks that each report a step, and return what they reported."""

import json
from unittest import mock

import torch
from torch import distributed

from production.training.metrics import step_metrics as module
from production.training.metrics.step_metrics import Group, StepMetrics, Timing
from production.training.metrics.token_counts import RowCounts

COUNTS = RowCounts(
    rows=2,
    tokens=128,
    padding_tokens=32,
    trained_tokens=50,
    truncated_rows=1,
    dropped_conversations=3,
    square_sum=(1 << 45) + 7,
)
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "send_object_list",
    "scatter_object_list",
    "barrier",
)


def report(metrics, timing, stop_vote=0):
    metrics.end_step(step=3, learning_rate=1e-4, gradient_norm=None, consumed_samples=6, timing=timing)
    (found,) = metrics.report(stop_vote=stop_vote)
    return found


def measured(_payload, worker):
    """All that a rank reports; as JSON has it, since that is what a record is."""
    rank = worker.rank
    everyone = distributed.new_group([0, 1, 2, 3])
    replicas = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    stages = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    pipes = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    of_tensor, tensor_calls = tensor(rank, replicas[rank % 2])
    return json.loads(
        json.dumps(
            {
                "one_stage": one_stage(rank, everyone),
                "tensor": of_tensor,
                "tensor_calls": tensor_calls,
                "two_stages": two_stages(rank, stages[rank // 2], pipes[rank % 2]),
            }
        )
    )


def counting_calls():
    calls = []

    def counted(name, original):
        def call(*args, **kwargs):
            calls.append(f"{name} over {distributed.get_world_size(kwargs.get('group'))}")
            return original(*args, **kwargs)

        return call

    patches = {name: counted(name, getattr(distributed, name)) for name in COLLECTIVES}
    return calls, mock.patch.multiple(distributed, **patches)


def sums_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(5, 1, generator=generator) * 1000, torch.randint(1, 300, (5, 1), generator=generator)


def one_stage(rank, group):
    """dp 2 × cp 2: ranks 0 and 1 share rows, and so do 2 and 3."""
    metrics = StepMetrics(group=Group(data=group, counts_rows=rank % 2 == 0, dimensions=(1, 2, 2, 1)), depths=1)
    losses, masks = sums_of(rank)
    for loss, mask in zip(losses, masks, strict=True):
        metrics.add_loss(loss[0], mask[0])
        metrics.add_multi_token(loss, mask)
        metrics.add_rows(COUNTS)
    timing = Timing(step_seconds=4.0, own_seconds=float(rank == 1) + 1, data_wait_seconds=rank / 8)
    calls, patched = counting_calls()
    with patched:
        found = report(metrics, timing)
    # As train_step of megatron.training reduces its "lm loss".
    value = torch.vstack([torch.stack([a[0], b[0].float()]) for a, b in zip(losses, masks, strict=True)]).sum(dim=0)
    distributed.all_reduce(value, group=group)
    return {"values": found.values(), "calls": calls, "megatron": (value[0] / value[1]).item()}


def two_stages(rank, data, pipeline):
    """pp 2 × dp 2: ranks 2 and 3 hold the last stage."""
    group = Group(data=data, pipeline=pipeline, has_loss=rank >= 2, dimensions=(1, 1, 2, 2))
    metrics = StepMetrics(group=group)
    if rank >= 2:
        metrics.add_loss(torch.tensor(6.0 * rank), torch.tensor(rank))
    metrics.add_rows(COUNTS)
    timing = Timing(
        step_seconds=4.0 + rank, own_seconds=[1.0, 3.0, 1.0, 1.0][rank], data_wait_seconds=[0.5, 0.0][rank // 2]
    )
    calls, patched = counting_calls()
    with patched, using(memory=[9000.0, 9001.0, 10.0, 20.0][rank]):
        found = report(metrics, timing, stop_vote=[0, 1, 2, 0][rank])
    return {"values": found.values(), "calls": calls, "stop_vote": metrics.stop_vote}


def tensor(rank, data):
    """dp 2 × tp 2: the data groups are ranks 0 and 2, and 1 and 3; ranks 1 and 3 are the slow and the full ones. Two steps at once."""
    metrics = StepMetrics(group=Group(data=data, dimensions=(2, 1, 2, 1)))
    for step in (1, 2):
        metrics.add_loss(torch.tensor(6.0), torch.tensor(2))
        timing = Timing(
            step_seconds=float(step),
            own_seconds=5.0 if rank == [3, 1][step - 1] else 1.0,
            data_wait_seconds=float(rank == 1),
        )
        with using(memory=float(100 * step + (50 if rank == 1 else rank))):
            metrics.end_step(step=step, learning_rate=1e-4, gradient_norm=None, consumed_samples=6, timing=timing)
    calls, patched = counting_calls()
    with patched:
        return [each.values() for each in metrics.report()], calls


def using(memory):
    return mock.patch.object(module, "memory_mebibytes", return_value=memory)
