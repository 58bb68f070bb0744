"""Four ranks on gloo, tp 2 x cp 2, that compute the online path's loss from logits which they share; the tests judge it."""

import torch
from torch import distributed

from production.loss import LossSettings, loss_function
from production.online.bins import Padding
from production.online.padded_batch import Conversation, build_padded_batch
from production.parallel.context_parallel import shard_index
from production.parallel.microbatches import MicrobatchSettings, process_microbatch
from production.training.metrics.step_metrics import Group, StepMetrics

TENSOR, CONTEXT, VOCABULARY, MICROBATCHES = 2, 2, 12, 3
CONVERSATIONS = [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([6, 7, 8], [0, 1, 1]), ([9, 10], [1, 1])]
SETTINGS = LossSettings(
    normalization="global_valid_tokens", num_microbatches=MICROBATCHES, context_parallel_size=CONTEXT
)


def padded_batch():
    return build_padded_batch(
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
        padded_batch(),
        MicrobatchSettings(
            context_parallel_rank=rank, context_parallel_size=size, padding=Padding(sequence_multiple=4)
        ),
    )


def work(_payload, worker):
    rank = worker.rank
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
        global_valid_tokens=padded_batch().valid_tokens(),
        tensor_group=tensor_groups[context_rank],
        context_group=context_groups[tensor_rank],
    )
    loss, report = compute(share.clone())
    (loss * CONTEXT / MICROBATCHES).backward()  # as the schedule does
    metrics = StepMetrics(group=Group(data=context_groups[tensor_rank]))
    metrics.add_loss(*report["lm loss"])
    return {
        "loss": loss.detach(),
        "gradient": share.grad[0],
        "index": index,
        "report": report["lm loss"],
        "reported": metrics.report_losses().loss,
    }
