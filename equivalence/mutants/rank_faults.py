"""Faults between ranks: what is not added up over them, and what does not reach them. Only training steps show these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from equivalence.generators.models import Layout
from equivalence.mutants.deal_faults import DP2
from equivalence.mutants.layout_mutant import CP2, LayoutMutant
from production.parallel.sizes import ParallelSizes

ONE = Layout(sizes=ParallelSizes(), data_size=1)
TP2 = Layout(sizes=ParallelSizes(tensor=2), data_size=1)
PP4 = Layout(sizes=ParallelSizes(pipeline=4), data_size=1)


def _one_segment(sound: Any) -> Any:
    return lambda boundaries: sound([boundaries[0], boundaries[-1]])


def _no_boundaries_in_the_middle(sound: Any) -> Any:
    def microbatches(batches: Any, settings: Any, place: Any, device: Any) -> Iterator[Any]:
        for number, made in sound(batches, settings, place, device):
            if place.is_first_stage or place.is_last_stage:
                yield number, made
                continue
            params, total = made.packed_seq_params, made.input_ids.numel() * place.context_size
            whole = torch.tensor([0, total], dtype=torch.int32)
            names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            changed = dict.fromkeys(names, whole) | dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), total)
            yield number, dataclasses.replace(made, packed_seq_params=dataclasses.replace(params, **changed))

    return microbatches


def _reduced_over_data_alone(sound: Any) -> Any:
    def wrap(*args: Any, **options: Any) -> Any:
        from megatron.core import parallel_state  # noqa: PLC0415 - megatron-core

        groups = parallel_state.get_data_parallel_group
        parallel_state.get_data_parallel_group = lambda *_, **__: groups()
        try:
            return sound(*args, **options)
        finally:
            parallel_state.get_data_parallel_group = groups

    return wrap


def _unmarked(sound: Any) -> Any:
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807 - what it replaces
        sound(self, *args, **options)
        self.weight.sequence_parallel = False

    return __init__


def _counted_alone(sound: Any) -> Any:
    del sound

    def count_valid(batches: Any, device: Any) -> torch.Tensor:
        from production.rows.batch import Batch, count_trained  # noqa: PLC0415 - those that are there

        counts = [count_trained(each) if isinstance(each, Batch) else each.valid_tokens() for each in batches]
        return torch.stack(counts).sum().to(device).float()

    return count_valid


def _not_shared(sound: Any) -> Any:
    def summed(self: Any, whole: torch.Tensor) -> torch.Tensor:
        sound(self, whole)  # the others wait for it
        own: torch.Tensor = self.own(whole)
        return own

    return summed


RANK_MUTANTS = (
    LayoutMutant(
        name="attention_across_segments",
        story="attention sees the whole row",
        target="production.model.device.attention_share:runs_of",
        wrong=_one_segment,
        first="leaks",
        layout=ONE,
    ),
    LayoutMutant(
        name="middle_stage_without_boundaries",
        story="boundaries do not reach the middle stages, whose attention crosses conversations: it cost 10 to 20 benchmark points",
        target="production.training.step:_microbatches",
        wrong=_no_boundaries_in_the_middle,
        first="third_witness",
        layout=PP4,
    ),
    LayoutMutant(
        name="gradients_not_reduced_over_context",
        story="gradients are added up over data-parallel ranks alone",
        target="production.training.step:wrap",
        wrong=_reduced_over_data_alone,
        first="models",
        layout=CP2,
    ),
    LayoutMutant(
        name="gradients_not_reduced_over_sequence",
        story="a norm's gradient is that of one tensor-parallel rank's part of the tokens",
        target="production.model.device.norm:RMSNorm.__init__",
        wrong=_unmarked,
        first="invariance",
        layout=TP2,
    ),
    LayoutMutant(
        name="keys_gradients_not_shared",
        story="keys and values are gathered, and other ranks' gradients for them are dropped",
        target="production.parallel.gather:Exchange.summed",
        wrong=_not_shared,
        first="models",
        layout=CP2,
    ),
    LayoutMutant(
        name="valid_tokens_of_a_rank",
        story="global_valid_tokens are those of a rank's own rows",
        target="production.training.step:count_valid",
        wrong=_counted_alone,
        first="models",
        layout=DP2,
    ),
)
"""Each needs a world of the layout that it names."""
