"""The direct and the online path through one real model (R-MEET-4): what R-MEET-2 calls equal is equal, and what differs is on its closed list."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from equivalence.checks.invariance import ranks_of
from equivalence.checks.leaks import RUN, Run
from equivalence.checks.models import ROUTER_TIE, bits, compare_gradients, difference, near, result, shapes_of
from equivalence.checks.result import CheckResult
from equivalence.compare import Difference
from equivalence.expected_steps import Expected, expect
from equivalence.model_cases import batch_of
from equivalence.models import GivenRectangles, ModelCase, RankOutcome, given, gradients
from production.batches import Batch
from production.rectangle import Rectangle
from production.squeeze import Padding
from reference.context_parallel import owned_positions

RUN_ONLINE = "equivalence.models:run_online"
DIRECT_PADDING_ID = 1
"""What the direct rows hold in padding: another id than the online path's 0."""


def check_paths(case: ModelCase, run: Run) -> CheckResult:
    """The same sequences through both paths, in `global_valid_tokens`, without multi-token prediction (R-ONLINE-7 has no tables).

    Token losses where a target counts, sums and counts of each microbatch, and every gradient agree: to the bit in a dense model, within
    R-MODEL-11's bounds with experts, which padding is dealt to as well. The direct path is held against the reference too.
    """
    bins = rectangles(case)
    rows = [direct_row(case, number, each) for number, each in enumerate(bins)]
    direct_case = given(case, rows)
    direct = run(RUN, direct_case)
    expected = expect(direct_case, shapes_of(gradients(direct)))
    if expected.is_tie:
        return CheckResult(check="paths", refused=ROUTER_TIE)
    fields = {each.name: getattr(case, each.name) for each in dataclasses.fields(ModelCase)}
    # With stages all rows have one length, which the last sequence of each fills (R-ONLINE-5).
    padding = Padding(sequence_multiple=case.multiple, row_length=case.pack_length if case.sizes.pipeline > 1 else None)
    online = run(RUN_ONLINE, GivenRectangles(**fields, rectangles=tuple(bins), padding=padding))
    differences = _tokens(case, rows, direct, online, expected)
    if case.shape.experts:
        differences += compare_gradients(gradients(direct), gradients(online), expected.gradient_bounds)
    else:
        there = gradients(online)
        for name, each in gradients(direct).items():
            differences += bits(f"gradient of {name}", each, there[name])
    padded = sum(sum(row) - sum(true) for row, true in zip(case.rows, case.lengths, strict=True))
    fired = {
        "loss_outside": int(sum(float(row.token_mask.sum()) for row in rows)),
        "padding_id": padded,
        "uncounted_label": sum(int((row.token_mask == 0).sum()) for row in rows),
    }
    checked = result("paths", "direct", "online", differences)
    return CheckResult(check="paths", findings=checked.findings, fired=fired)


def rectangles(case: ModelCase) -> list[Rectangle]:
    """The bins: ids and masks of the case's rows, cut to true lengths and right-padded."""
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
            Rectangle(
                input_ids=ids,
                token_mask=mask,
                input_lengths=torch.tensor(lengths),
                sample_mask=torch.ones(len(lengths)),
            )
        )
    return found


def direct_row(case: ModelCase, row: int, bin_: Rectangle) -> Batch:
    """The same sequences as the direct path's row under `strict`: the format's pad id, -100 where no target follows."""
    length = case.pack_length
    ids = torch.full((1, length), DIRECT_PADDING_ID)
    targets = torch.full((1, length), -100)
    mask = torch.zeros(1, length)
    for number, (true, start) in enumerate(zip(case.lengths[row], case.boundaries[row], strict=False)):
        ids[0, start : start + true] = bin_.input_ids[number, :true]
        targets[0, start : start + true - 1] = bin_.input_ids[number, 1:true]
        mask[0, start : start + true - 1] = bin_.token_mask[number, 1:true]
    return batch_of([case.rows[row]], ids, targets, mask)


def _tokens(
    case: ModelCase,
    rows: Sequence[Batch],
    direct: Sequence[RankOutcome],
    online: Sequence[RankOutcome],
    expected: Expected,
) -> list[Difference]:
    differences: list[Difference] = []
    for row, batch in enumerate(rows):
        for one, other in zip(ranks_of(case, row, direct), ranks_of(case, row, online), strict=True):
            owned = owned_positions(case.boundaries[row], one.place.context_rank, one.place.context_size)
            counted = batch.token_mask[0, owned] == 1
            microbatch, where = row // case.data_size, f"row {row} on rank {one.place.rank}"
            a, b = one.token_losses[microbatch][0][counted], other.token_losses[microbatch][0][counted]
            sums = one.reports[microbatch], other.reports[microbatch]
            if case.shape.experts:
                differences += near(f"{where} token losses", a, b, expected.token_bound)
                bound = expected.token_bound * max(1, int(counted.sum()))
                differences += near(f"{where} reported", sums[0].double(), sums[1].double(), bound)
            else:
                differences += bits(f"{where} token losses", a, b)
                differences += bits(f"{where} reported", *sums)
    for one, other in itertools.chain(zip(direct, online, strict=True)):
        if one.valid_tokens != other.valid_tokens:
            name = f"rank {one.place.rank} valid tokens"
            differences.append(difference(name, None, one.valid_tokens, other.valid_tokens))
    return differences
