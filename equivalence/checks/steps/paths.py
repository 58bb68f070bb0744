"""The direct and the online path through one real model (R-MEET-4): what R-MEET-2 calls equal is equal, and what differs is on its closed list."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult
from equivalence.cases.step import batch_of
from equivalence.checks.steps.invariance import ranks_of
from equivalence.checks.steps.leaks import RUN, Run
from equivalence.checks.steps.models import (
    ROUTER_TIE,
    bits,
    compare_gradients,
    difference,
    near,
    paired,
    result,
    shapes_of,
)
from equivalence.expectations.step import Expected, expect
from equivalence.trainers.production_step import GivenPaddedBatches, ModelCase, RankOutcome, given, gradients
from production.online.bins import Padding
from production.online.padded_batch import PaddedBatch
from production.rows.batch import Batch
from reference import microbatches as reference
from reference import multi_token
from reference.context_parallel import owned_positions

RUN_ONLINE = "equivalence.trainers.production_step:run_online"
DIRECT_PADDING_ID = 1
"""Id in the padding of the direct rows: another id than the online path's 0."""


def check_paths(case: ModelCase, run: Run) -> CheckResult:
    """Compare the same sequences through both paths, in `global_valid_tokens`, with the multi-token prediction of the case.

    Token losses where a target counts, sums and counts of each microbatch and depth, and every gradient agree: to the bit in a dense model,
    within R-MODEL-11's bounds with experts, which also receive padding. The direct path takes its depths from tables, the online path as the
    case says: from tables, or from megatron-core's own roll. Both are also compared with the reference, which squeezes and shifts the rows itself.
    """
    bins = padded_batches(case)
    rows = [direct_row(case, number, each) for number, each in enumerate(bins)]
    direct = run(RUN, dataclasses.replace(given(case, rows), mtp="tables"))
    found = gradients(direct)
    expected = expect(
        given(case, [reference_row(case, number, each) for number, each in enumerate(bins)]), shapes_of(found)
    )
    if expected.is_tie:
        return CheckResult(check="paths", refused=ROUTER_TIE)
    fields = {each.name: getattr(case, each.name) for each in dataclasses.fields(ModelCase)}
    # With stages all rows have one length, which the last sequence of each fills (R-ONLINE-5).
    padding = Padding(sequence_multiple=case.multiple, row_length=case.pack_length if case.sizes.pipeline > 1 else None)
    online = run(RUN_ONLINE, GivenPaddedBatches(**fields, padded_batches=tuple(bins), padding=padding))
    differences = [*_tokens(case, rows, direct, online, expected), *_reports(case, direct, online, expected)]
    there = gradients(online)
    differences += compare_gradients(expected.gradients, there, expected.gradient_bounds)
    if case.shape.experts:
        differences += compare_gradients(found, there, expected.gradient_bounds)
    else:
        for name, each in found.items():
            differences += bits(f"gradient of {name}", each, there[name])
    padded = sum(sum(row) - sum(true) for row, true in zip(case.rows, case.lengths, strict=True))
    fired = {
        "loss_outside": int(sum(float(row.token_mask.sum()) for row in rows)),
        "padding_id": padded,
        "uncounted_label": sum(int((row.token_mask == 0).sum()) for row in rows),
    }
    checked = result("paths", "direct", "online", differences)
    return CheckResult(check="paths", findings=checked.findings, fired=fired)


def padded_batches(case: ModelCase) -> list[PaddedBatch]:
    """Return the bins: ids and masks of the case's rows, cut to true lengths and right-padded."""
    batch, factor = case.batch(), case.multiple
    found = []
    for row, lengths in enumerate(case.lengths):
        width = -(-max(lengths) // factor) * factor
        ids = torch.zeros(len(lengths), width, dtype=torch.int64)
        mask = torch.zeros(len(lengths), width)
        for number, (length, start) in enumerate(zip(lengths, case.boundaries[row], strict=False)):
            ids[number, :length] = batch.input_ids[row, start : start + length]
            mask[number, :length] = batch.token_mask[row, start : start + length]
        found.append(
            PaddedBatch(
                input_ids=ids,
                token_mask=mask,
                input_lengths=torch.tensor(lengths),
                sample_mask=torch.ones(len(lengths)),
            )
        )
    return found


def direct_row(case: ModelCase, row: int, bin_: PaddedBatch) -> Batch:
    """Return the same sequences as the direct path's row under `strict`: with the format's pad id, and -100 where no target follows."""
    length = case.pack_length
    ids = torch.full((1, length), DIRECT_PADDING_ID)
    targets = torch.full((1, length), -100)
    mask = torch.zeros(1, length)
    for number, (true, start) in enumerate(zip(case.lengths[row], case.boundaries[row], strict=False)):
        ids[0, start : start + true] = bin_.input_ids[number, :true]
        targets[0, start : start + true - 1] = bin_.input_ids[number, 1:true]
        mask[0, start : start + true - 1] = bin_.token_mask[number, 1:true]
    return batch_of([case.rows[row]], ids, targets, mask)


def reference_row(case: ModelCase, row: int, bin_: PaddedBatch) -> Batch:
    """Return the row as the reference squeezes it (R-ONLINE-4), with the labels and masks that are shifted to depths (R-ONLINE-7)."""
    squeezed = reference.squeeze(
        reference.PaddedBatch(
            input_ids=bin_.input_ids,
            token_mask=bin_.token_mask,
            input_lengths=bin_.input_lengths.tolist(),
            sample_mask=bin_.sample_mask,
        ),
        reference.Padding(sequence_multiple=case.multiple, row_multiple=1, row_length=case.pack_length),
    )
    labels = multi_token.shift(squeezed.input_ids, squeezed.cu_seqlens_padded, 1)
    mask = multi_token.shift(squeezed.token_mask, squeezed.cu_seqlens_padded, 1)
    return batch_of([case.rows[row]], squeezed.input_ids[None], labels[None], mask[None])


def _tokens(
    case: ModelCase,
    rows: Sequence[Batch],
    direct: Sequence[RankOutcome],
    online: Sequence[RankOutcome],
    expected: Expected,
) -> list[Difference]:
    """Compare token losses at every depth where a target counts: of both paths with each other, and of the online path with the reference."""
    differences: list[Difference] = []
    for row, batch in enumerate(rows):
        boundaries, microbatch = case.boundaries[row], row // case.data_size
        masks = [multi_token.shift(batch.token_mask[0], boundaries, depth) for depth in range(case.shape.depths + 1)]
        for one, other in zip(ranks_of(case, row, direct), ranks_of(case, row, online), strict=True):
            place = one.place
            owned = owned_positions(boundaries, place.context_rank, place.context_size)
            theirs = expected.token_losses[place.data_rank * place.context_size + place.context_rank][microbatch]
            sides = zip(masks, one.token_losses[microbatch], other.token_losses[microbatch], theirs, strict=True)
            for depth, (mask, *each) in enumerate(sides):
                a, b, c = (side[mask[owned] == 1] for side in each)
                name = f"row {row} on rank {place.rank} depth {depth} token losses"
                differences += near(name, a, b, expected.token_bound) if case.shape.experts else bits(name, a, b)
                differences += near(f"{name}, reference", c, b, expected.token_bound)
    return differences


def _reports(
    case: ModelCase, direct: Sequence[RankOutcome], online: Sequence[RankOutcome], expected: Expected
) -> list[Difference]:
    """Return the reports of each rank: sums and counts of its microbatches, the mean of each depth, and how many
    tokens count.
    """
    differences: list[Difference] = []
    for one, other in zip(direct, online, strict=True):
        where = f"rank {one.place.rank}"
        if one.valid_tokens != other.valid_tokens:
            differences.append(difference(f"{where} valid tokens", None, one.valid_tokens, other.valid_tokens))
        pairs = list(paired(f"{where} microbatch", one.reports, other.reports, differences))
        if one.mtp_losses is not None and other.mtp_losses is not None:
            pairs.append((f"{where} depths", one.mtp_losses, other.mtp_losses))
        if one.reported is not None and other.reported is not None:
            pairs.append((f"{where} step", torch.tensor(one.reported), torch.tensor(other.reported)))
        for name, a, b in pairs:
            if case.shape.experts:
                # A sum is off by at most what each of its tokens is; a depth's mean by less.
                bound = expected.token_bound * max(1.0, one.valid_tokens)
                differences += near(f"{name} reported", a.double(), b.double(), bound)
            else:
                differences += bits(f"{name} reported", a, b)
    return differences
