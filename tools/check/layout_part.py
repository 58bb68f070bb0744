"""Part `layout`: rows of the job's file cut for its real layout, and training steps in a layout of the same kinds on CPU ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from equivalence.cases.result import CheckResult
from equivalence.cases.step import ModelCase
from equivalence.generators.models import domain_factor
from equivalence.runner.step_runs import Entered, check_case, has_witness, plain_layout, preload_models
from equivalence.trainers.production_step import given
from production.errors import BadInput, PackproofError, RowRefused
from production.rows.builder import Row, RowBuilder
from production.training.config import multi_token_depths, sizes
from tools.check.cut_rows import cut_rows
from tools.check.edges import spread
from tools.check.progress import Progress
from tools.check.result import Finding, PartResult
from tools.check.scan import Scanned, place_of
from tools.check.shrink import SmallLayout, small_layouts, small_shape
from tools.check.target import Target
from tools.counted import counted
from tools.simulate.costs import costs_of
from tools.simulate.layout import Job as WalkedJob
from tools.simulate.walk import Walk, walk

MOST_WALKED_TOKENS = 1 << 24
"""Tokens of the rows that are walked at most, but for one row a data-parallel rank that has room."""
MOST_FINDINGS = 5
TIES = 3
"""Seeds that are tried where the reference's router chooses by a gap within rounding."""
_NO_CUDA = "CUDA: kernels (attention, cross entropy, experts, fp8), their precision and their speed; steps ran on CPU ranks in float64"


def check_layout(
    target: Target, scanned: Scanned, *, deadline: float, progress: Progress, entered: Entered = plain_layout
) -> PartResult:
    """Walk the job's own layout, then train steps in smaller layouts of the same kinds.

    `entered` makes the ranks of a layout; only tests replace it.
    """
    started = time.monotonic()
    result = PartResult(name="layout", not_shown=[_NO_CUDA])
    rows = _Rows(target, scanned)
    progress.start("the layout of every rank")
    walked = _walk(target, rows, result)
    names = []
    if time.monotonic() > deadline:
        result.not_shown.append("training steps: the budget was spent")
    else:
        names = _train(target, rows, result, progress, entered)
    result.status = "differs" if result.findings else "equal" if result.compared and names else "not run"
    faults = f", {counted(len(result.findings), 'fault')}" if result.findings else ""
    result.summary = f"{walked}; training steps in {', '.join(names) or 'no layout'}{faults}"
    result.seconds = time.monotonic() - started
    return result


class _Rows:
    """Rows that a run would train on, built by production: those near an edge first."""

    def __init__(self, target: Target, scanned: Scanned) -> None:
        self._dataset = target.train
        self._builder = RowBuilder(tokenizer=target.tokenizer, settings=self._dataset.settings)
        chosen = list(scanned.edges.chosen()) if scanned.dataset is self._dataset else []
        self._numbers = list(dict.fromkeys([*chosen, *spread(len(self._dataset.source), 256)]))
        self._built: dict[int, Row] = {}
        self.pad_id = self._builder.pad_token_id or 0

    def take(self, count: int) -> list[tuple[int, Row]]:
        """Return at most `count` rows, none of them twice."""
        for number in self._numbers:
            if len(self._built) >= count:
                break
            if number in self._built:
                continue
            try:
                self._built[number] = self._builder.build(self._dataset.source[number])
            except (RowRefused, BadInput):
                continue  # the part `file` tells it
        return list(itertools.islice(self._built.items(), count))

    def place(self, number: int) -> str:
        """Return where a row stands."""
        return place_of(self._dataset, number)


def _walk(target: Target, rows: _Rows, result: PartResult) -> str:
    """Walk every rank of the job's own layout over a global batch of its rows, or as much of one as is affordable."""
    job, layout = target.job, sizes(target.job)
    data_size, length = layout.data(target.ranks), job.policy.max_total_sequence_length
    most = max(1, MOST_WALKED_TOKENS // length)
    walked_size = min(data_size, most)
    count = walked_size * max(1, min(job.policy.train_global_batch_size // data_size, most // walked_size))
    taken = rows.take(count)
    if not taken:
        result.findings.append(Finding(what="no row of the file can be built", fix="see the part file"))
        return "no row"
    numbers = [taken[at % len(taken)] for at in range(count)]
    try:
        walked = WalkedJob(
            tp=layout.tensor,
            cp=layout.context,
            ep=layout.expert if (layout.tensor * layout.context * walked_size) % layout.expert == 0 else 1,
            dp=walked_size,
            pp=layout.pipeline,
            pack_length=length,
            rows=count,
            layout="zigzag",
            sequence_parallel=layout.tensor > 1,
            depths=multi_token_depths(job),
            **_sizes_of_the_model(target),
        )
        found = walk(walked, [row.cu_seqlens for _, row in numbers])
    except PackproofError as error:
        row = getattr(error, "row", None)
        where = rows.place(numbers[row][0]) if isinstance(row, int) else error.where
        result.findings.append(Finding(what=error.what, where=where, fix=error.fix))
        return "the layout cannot be cut"
    result.compared += count
    result.numbers["walk"] = _load(found)
    result.witnesses = ("the simulator's own search of owners", *result.witnesses)
    result.findings += [
        Finding(
            what=fault, fix="report it with this job; look at one rank with packproof diff-row --tp … --cp … --rank …"
        )
        for fault in found.faults[:MOST_FINDINGS]
    ]
    if walked_size < data_size:
        result.not_shown.append(
            f"the walk took {walked_size} of {counted(data_size, 'data-parallel rank')}, whose rows are cut alike"
        )
    elif count < job.policy.train_global_batch_size:
        result.not_shown.append(
            f"the walk took {counted(count, 'row')}, where a global batch has {job.policy.train_global_batch_size}"
        )
    held = "tokens are lost or held twice" if found.faults else "every token has one owner"
    return f"{counted(walked.ranks, 'rank')} and {counted(count, 'row')} walked, {held}"


def _sizes_of_the_model(target: Target) -> dict[str, int]:
    """Return what decides how much ranks send; where the shape is not known here, the simulator's own defaults."""
    model = target.job.model
    hidden, heads = model.hidden_size or 4096, model.num_attention_heads or 32
    return {
        "hidden": hidden,
        "kv_heads": model.num_query_groups or heads,
        "head_dim": model.kv_channels or max(1, hidden // heads),
        "topk": model.moe_router_topk,
        "value_bytes": {"float64": 8, "float32": 4}.get(target.job.policy.precision, 2),
    }


def _load(found: Walk) -> dict[str, Any]:
    costs, work = costs_of(found), found.work.sum(dim=1).double()
    return {
        "ranks": found.job.ranks,
        "rows": found.job.rows,
        "tokens_of_a_rank": [int(found.tokens.sum(dim=1).min()), int(found.tokens.sum(dim=1).max())],
        "work_of_the_busiest_rank_over_the_mean": round(float(work.max() / work.mean()), 4),
        "multi_token_roll_messages": costs.roll_messages,
        "multi_token_table_messages": costs.table_messages,
        "attention_bytes_a_layer": costs.attention_bytes_in_all,
        "expert_bytes_of_a_rank_a_layer_and_row": costs.expert_bytes,
        "stage_bytes": costs.stage_bytes,
    }


def _train(target: Target, rows: _Rows, result: PartResult, progress: Progress, entered: Entered) -> list[str]:
    """Train one step in each small layout, and hold it against the reference and Megatron-LM's own pieces."""
    job = target.job
    real = sizes(job)
    progress.start("importing megatron-core's models")
    preload_models()
    names, witnesses = [], ["reference"]
    for small in small_layouts(real, real.data(target.ranks)):
        microbatches = small.sizes.pipeline + 1 if small.sizes.pipeline in (2, 4) else 2
        taken = rows.take(small.data_size * microbatches)
        if not taken:
            break
        progress.start(f"a training step in {small.name}")
        steps, lacks = _cases(target, rows, taken, small, microbatches)
        ran = _run(steps, entered)
        if ran is None:
            result.not_shown.append(
                f"{small.name}: the router chose by a gap within rounding for {TIES} draws of weights"
            )
            continue
        names.append(small.name)
        result.compared += len(steps[0].rows)
        result.findings += _step_findings(ran, small)
        result.not_shown += [each for each in lacks if each not in result.not_shown]
        if (small.sizes, small.data_size) != (real, real.data(target.ranks)):
            result.not_shown.append(
                f"the layout was shrunk to {small.name} for training steps ({counted(small.sizes.of_a_replica * small.data_size, 'rank')})"
            )
        if has_witness(steps[0]):
            witnesses.append("Megatron-LM's own pieces in the same layout")
        else:
            result.not_shown.append(
                f"{small.name}: Megatron-LM divides no losses as {job.loss.normalization} with depths weighed by {job.loss.mtp_weights}, so only the reference was its witness"
            )
        if steps[0].world_size > 1:
            witnesses.append("the same step on one rank")
    result.witnesses = tuple(dict.fromkeys([*result.witnesses, *witnesses]))
    result.numbers["steps"] = names
    return names


def _cases(
    target: Target, rows: _Rows, taken: Sequence[tuple[int, Row]], small: SmallLayout, microbatches: int
) -> tuple[list[ModelCase], list[str]]:
    """Return the step with several draws of weights, since a router may choose by a gap within rounding."""
    count = small.data_size * microbatches
    again = [taken[at % len(taken)][1] for at in range(count)]
    batches, lengths, ids = cut_rows(
        again,
        unit=domain_factor(small.sizes),
        segment_unit=2 * small.sizes.context if small.sizes.context > 1 else 1,
        pad_id=rows.pad_id,
    )
    shape, lacks = small_shape(target.job, small, ids)
    job = target.job
    cases: list[ModelCase] = []
    for seed in range(0, 2 * TIES, 2):
        case = ModelCase(
            shape=shape,
            sizes=small.sizes,
            data_size=small.data_size,
            rows=tuple(lengths),
            masked=(1.0,) * count,
            normalization=job.loss.normalization,
            mtp_weights=job.loss.mtp_weights,
            seed=seed,
        )
        cases.append(given(case, batches))
    return cases, [
        *lacks,
        f"training steps: rows were cut to {counted(sum(lengths[0]), 'token')} and their ids numbered again (0 to {ids - 1})",
    ]


def _run(steps: Sequence[ModelCase], entered: Entered) -> list[CheckResult] | None:
    """Return the results of the first step that is no tie; None where all are."""
    for step in steps:
        found = check_case(step, entered=entered)
        if not any(each.refused for each in found):
            return found
    return None


def _step_findings(found: Sequence[CheckResult], small: SmallLayout) -> list[Finding]:
    findings = []
    for result in found:
        for each in result.findings:
            first = each.differences[0]
            at = "" if first.position is None else f" at {first.position}"
            findings.append(
                Finding(
                    what=f"{each.left} and {each.right} differ in {counted(len(each.differences), 'value')} of a training step ({result.check}), "
                    f"first in {first.tensor}{at}: {first.left} and {first.right}",
                    where=f"layout {small.name}",
                    fix="this is a fault of packproof or of the installed megatron-core, not of the file: report it with the job",
                )
            )
    return findings[:MOST_FINDINGS]
