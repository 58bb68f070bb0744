"""A whole run of the training job against the reference's (R-TRAIN, R-ORDER, R-BATCH-3 to 5, R-LOSS-7 and 10): what each rank is fed, what is reported and logged,
rates and decays of each step, validations, the weights after the last step; through a stop in the middle and a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equivalence.cases.difference import Difference
from equivalence.cases.result import CheckResult
from equivalence.checks.runs.trainer import TIES, near_in_norm
from equivalence.checks.steps.models import ROUTER_TIE, bits, difference, near, result
from equivalence.expectations.run import Counts, ExpectedRun
from equivalence.trainers.production_step import Part
from equivalence.trainers.whole_run import VALIDATION_PERIOD, Record, RunCase, RunOutcome
from production.model.weights import assemble
from production.training.metrics.summary import summarize

NAME = "whole_run"
ENDS = ("signal", "finished")
"""Reasons for which the two parts of a run end."""
LOGGED = {"run": 2, "end": 2}
"""Lines of these kinds in the log of a run that was stopped once."""
_SECONDS = 1e-6
"""Largest relative error of `rate * seconds` against the number that the rate was computed from; a message holds rate and seconds in float32."""

Parts = Sequence[RunOutcome]
"""Records of one rank, before the stop and after it."""


def check_whole_run(
    case: RunCase, outcomes: Sequence[Parts], expected: ExpectedRun, log: Sequence[Record]
) -> CheckResult:
    """Compare production's run, given by the parts of each rank, with the reference's run. Refuse as `router_tie` if rounding chose an expert."""
    if expected.trained.router_gap <= TIES[case.precision]:
        return CheckResult(check=NAME, refused=ROUTER_TIE)
    differences: list[Difference] = []
    for parts in outcomes:
        differences += _course(case, parts)
        differences += _fed(case, parts, expected)
        differences += _scheduled(parts, expected)
    differences += _reported(case, outcomes, expected)
    differences += _logged(outcomes[0], expected, log)
    differences += _weights(outcomes, expected)
    return result(NAME, "reference", "production", differences)


def whole(parts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """Assemble the whole model's weights by name from the weights of all ranks."""
    pieces: dict[str, list[Any]] = {}
    for piece in (piece for of_rank in parts for piece in of_rank):
        place = tuple(slice(*bounds) for bounds in piece.part)
        pieces.setdefault(piece.name, []).append((piece.shape, place, piece.values))
    return assemble(pieces)


def _course(case: RunCase, parts: Parts) -> list[Difference]:
    """Return how both parts ended, and which steps they took."""
    wanted = [*zip((case.stop_after, case.steps), ENDS, strict=True)]
    ended = [(part.step, part.reason) for part in parts]
    steps = [[*range(1, case.stop_after + 1)], [*range(case.stop_after + 1, case.steps + 1)]]
    reported = [sorted(part.numbers) for part in parts]
    where = f"rank {parts[0].rank}"
    return [*_same(f"{where} ended", wanted, ended), *_same(f"{where} reported steps", steps, reported)]


def _fed(case: RunCase, parts: Parts, expected: ExpectedRun) -> list[Difference]:
    """Compare the rows of each step and of each validation exactly."""
    first = parts[0]
    fed = {step: rows for part in parts for step, rows in part.fed.items()}
    differences: list[Difference] = []
    for step, batch in enumerate(expected.steps, 1):
        name = f"rank {first.rank} rows of step {step}"
        differences += _same(name, batch.of_rank(first.data_rank, case.data_size), fed.get(step))
    wanted = [batch.of_rank(first.data_rank, case.data_size) for batch in expected.validation]
    # One that is due in the step that the signal comes in is made up for by the part that goes on.
    before, after = (
        [step for step in range(first_step, last) if step % VALIDATION_PERIOD == 0]
        for first_step, last in ((0, case.stop_after), (case.stop_after, case.steps + 1))
    )
    for part, steps in zip(parts, (before, after), strict=True):
        differences += _same(
            f"rank {first.rank} rows of validations after {steps}", wanted * len(steps), part.validated
        )
    return differences


def _scheduled(parts: Parts, expected: ExpectedRun) -> list[Difference]:
    """Compare the rate, the decay and Adam's count of each step, for all parameters, exactly."""
    differences: list[Difference] = []
    for step, wanted in enumerate(expected.trained.steps, 1):
        where = f"rank {parts[0].rank}"
        rates = [part.rates[step] for part in parts if step in part.rates]
        decays = [part.decays[step] for part in parts if step in part.decays]
        differences += _same(f"{where} learning rates of step {step}", [{wanted.learning_rate}], rates)
        differences += _same(f"{where} weight decays of step {step}", [{0.0, wanted.weight_decay}], decays)
        counted = [part.counted[step] for part in parts if step in part.counted]
        differences += _same(f"{where} steps that Adam has counted before step {step}", [{step - 1}], counted)
    return differences


def _reported(case: RunCase, outcomes: Sequence[Parts], expected: ExpectedRun) -> list[Difference]:
    """Compare the metrics of each step: counts and rates exactly, losses and norms within R-TRAIN-9, equal on all ranks."""
    differences: list[Difference] = []
    trained = expected.trained
    numbers = {step: values for part in outcomes[0] for step, values in part.numbers.items()}
    for parts in outcomes[1:]:
        others = {step: values for part in parts for step, values in part.numbers.items()}
        differences += _same(f"what rank {parts[0].rank} reports", numbers, others)
    for step, wanted in enumerate(trained.steps, 1):
        found, place = numbers.get(step, {}), step - 1
        losses = {"loss": (wanted.loss, trained.loss_bounds[place])}
        for number, depth in enumerate(wanted.depths):
            name = f"mtp_{number + 1}"
            losses[f"{name}_loss"] = (depth.loss, trained.depth_bounds[place][number])
            losses[f"{name}_loss_by_tokens"] = (depth.token_loss, trained.token_depth_bounds[place][number])
        losses["load_balancing_loss"] = (wanted.balancing_loss, trained.balancing_bounds[place])
        for name, (value, bound) in (
            losses | {"gradient_norm": (wanted.gradient_norm, trained.norm_bounds[place])}
        ).items():
            differences += _close(f"{name} of step {step}", value, found.get(name), bound)
        exact = {
            "learning_rate": wanted.learning_rate,
            "consumed_samples": step * case.global_batch_size,
            "all_masked": False,
        } | _counts(expected.steps[place].counts)
        exact |= {f"mtp_{number}_empty_shares": depth.empty_shares for number, depth in enumerate(wanted.depths, 1)}
        for name, value in exact.items():
            differences += _same(f"{name} of step {step}", value, found.get(name))
        tokens = found.get("tokens_per_second", 0.0) * found.get("step_seconds", 0.0)
        counted = expected.steps[place].counts.tokens
        differences += _close(
            f"tokens_per_second of step {step}, times its seconds", counted, tokens, _SECONDS * counted
        )
    return differences


def _counts(counts: Counts) -> dict[str, float | int]:
    return {
        "tokens": counts.tokens,
        "trained_tokens": counts.trained_tokens,
        "padding_share": counts.padding_tokens / counts.tokens,
        "rows_truncated": counts.rows_truncated,
        "conversations_dropped": counts.conversations_dropped,
    }


def _logged(parts: Parts, expected: ExpectedRun, log: Sequence[Record]) -> list[Difference]:
    """Compare the log's lines: each step once and as reported, each validation once and as the reference computes it."""
    steps = [(each.step, each.values) for each in log if each.kind == "step"]
    reported = [(step, values) for part in parts for step, values in part.numbers.items()]
    differences = _same("steps of the log", reported, steps)
    differences += _same("lines of the log", LOGGED, {kind: sum(each.kind == kind for each in log) for kind in LOGGED})
    validations = {each.step: each.values for each in log if each.kind == "validation"}
    count = sum(each.kind == "validation" for each in log)
    differences += _same("validations of the log", sorted(expected.trained.validations), sorted(validations))
    differences += _same("validations of the log, how many", len(expected.trained.validations), count)
    for step, loss in expected.trained.validations.items():
        found = validations.get(step, {})
        bound = expected.trained.validation_bounds[step]
        differences += _close(f"validation_loss after step {step}", loss, found.get("validation_loss"), bound)
        wanted = len(expected.validation)
        differences += _same(f"validation_batches after step {step}", wanted, found.get("validation_batches"))
    ends = [each.values.get("reason") for each in log if each.kind == "end"]
    differences += _same("ends in the log", [*ENDS], ends)
    return [*differences, *_summarized(expected, log)]


def _summarized(expected: ExpectedRun, log: Sequence[Record]) -> list[Difference]:
    """Compare the summary that a run prints at its end with the counts of all steps, of both parts together."""
    counts, steps = [batch.counts for batch in expected.steps], len(expected.steps)
    positions = sum(each.tokens for each in counts)
    wanted = {
        "steps": steps,
        "starts": len(ENDS),
        "steps with a loss": [*range(1, steps + 1)],
        "validations": sorted(expected.trained.validations),
        "trained tokens": sum(each.trained_tokens for each in counts),
        "padding": sum(each.padding_tokens for each in counts),
        "truncated rows": sum(each.rows_truncated for each in counts),
        "dropped conversations": sum(each.conversations_dropped for each in counts),
    }
    found = summarize(log)  # type: ignore[arg-type]  # lines of the same fields
    if found is None:
        return _same("summary", wanted, None)
    told = {
        "steps": found.steps,
        "starts": found.starts,
        "steps with a loss": [step for step, _ in found.losses],
        "validations": [step for step, _ in found.validation_losses],
        "trained tokens": found.trained_tokens,
        "padding": round(found.padding_share * positions),
        "truncated rows": found.rows_truncated,
        "dropped conversations": found.conversations_dropped,
    }
    return [each for name, value in wanted.items() for each in _same(f"summary: {name}", value, told[name])]


def _weights(outcomes: Sequence[Parts], expected: ExpectedRun) -> list[Difference]:
    """Compare the weights after the last step within R-TRAIN-9, and the weights at the resume with the weights at the stop to the bit."""
    stopped, resumed, ended = (
        whole([getattr(parts[part], name) for parts in outcomes])
        for part, name in ((0, "weights"), (1, "begun"), (1, "weights"))
    )
    differences: list[Difference] = []
    if stopped.keys() == resumed.keys():
        for name in sorted(stopped):
            differences += bits(f"weight {name}, resumed", stopped[name], resumed[name])
    trained = expected.trained
    differences += _same("names of weights", sorted(trained.weights), sorted(ended))
    for name in sorted(trained.weights.keys() & ended.keys()):
        differences += near_in_norm(name, trained.weights[name], ended[name], trained.weight_bounds[name])
    return differences


def _same(name: str, left: object, right: object) -> list[Difference]:
    """Compare two values for equality; of sequences and mappings, report only the differing items."""
    if left == right:
        return []
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
        return _same(f"{name}: {keys[0]}", left.get(keys[0]), right.get(keys[0]))
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return [difference(f"{name}: how many", None, len(left), len(right))]
        place = next(place for place, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
        return _same(f"{name} [{place}]", left[place], right[place])
    return [difference(name, None, _told(left), _told(right))]


def _told(value: object) -> object:
    """Return numbers unchanged, and every other value as a text of at most one line."""
    if isinstance(value, float | int | str | None):
        return value
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _close(name: str, left: float, right: float | None, bound: float) -> list[Difference]:
    found = math.nan if right is None else right
    return near(name, torch.tensor(left, dtype=torch.float64), torch.tensor(found, dtype=torch.float64), bound)
