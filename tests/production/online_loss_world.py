"""Four ranks on gloo, tp 2 x cp 2, that compute the online path's loss from logits which they share; the tests judge it.

    python online_loss_world.py FOLDER

A process of its own, because ranks are forked: in pytest's, autograd and OpenMP have long been at work.
"""

import multiprocessing
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed

warnings.simplefilter("ignore")  # of megatron-core, that CUDA and optional kernels are absent

from production.loss import LossSettings, loss_function  # noqa: E402
from production.online.bins import Padding  # noqa: E402
from production.online.padded_batch import Conversation, build_rectangle  # noqa: E402
from production.parallel.context_parallel import shard_index  # noqa: E402
from production.parallel.microbatches import MicrobatchSettings, process_microbatch  # noqa: E402
from production.training.metrics.step_metrics import Group, StepMetrics  # noqa: E402

TENSOR, CONTEXT, VOCABULARY, MICROBATCHES = 2, 2, 12, 3
CONVERSATIONS = [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([6, 7, 8], [0, 1, 1]), ([9, 10], [1, 1])]
SETTINGS = LossSettings(
    normalization="global_valid_tokens", num_microbatches=MICROBATCHES, context_parallel_size=CONTEXT
)


def rectangle():
    return build_rectangle(
        [
            Conversation(token_ids=torch.tensor(ids), token_mask=torch.tensor(mask, dtype=torch.float32))
            for ids, mask in CONVERSATIONS
        ],
        make_sequence_length_divisible_by=4,
    )


def logits():
    """[T, V] float32 of the whole row."""
    return torch.randn(16, VOCABULARY, generator=torch.Generator().manual_seed(1))


def microbatch(rank, size=CONTEXT):
    return process_microbatch(
        rectangle(),
        MicrobatchSettings(
            context_parallel_rank=rank, context_parallel_size=size, padding=Padding(sequence_multiple=4)
        ),
    )


def work(rank, folder):
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), TENSOR * CONTEXT)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=TENSOR * CONTEXT)
    tensor_groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    context_groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    context_rank, tensor_rank = divmod(rank, TENSOR)
    own = microbatch(context_rank)
    index = shard_index(own.row.cu_seqlens_padded, context_rank, CONTEXT)
    half = VOCABULARY // TENSOR
    share = logits()[index, tensor_rank * half : (tensor_rank + 1) * half][None].requires_grad_()
    compute = loss_function(
        own,
        SETTINGS,
        global_valid_tokens=rectangle().valid_tokens(),
        tensor_group=tensor_groups[context_rank],
        context_group=context_groups[tensor_rank],
    )
    loss, report = compute(share.clone())
    (loss * CONTEXT / MICROBATCHES).backward()  # as the schedule does
    metrics = StepMetrics(group=Group(data=context_groups[tensor_rank]))
    metrics.add_loss(*report["lm loss"])
    torch.save(
        {
            "loss": loss.detach(),
            "gradient": share.grad[0],
            "index": index,
            "report": report["lm loss"],
            "reported": metrics.report_losses().loss,
        },
        folder / f"{rank}.pt",
    )
    distributed.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(rank, Path(sys.argv[1]))) for rank in range(TENSOR * CONTEXT)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        if worker.exitcode is None:
            worker.kill()
    sys.exit(any(worker.exitcode != 0 for worker in workers))
