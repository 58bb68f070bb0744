"""Run Megatron-LM's half of training steps under one version: `python -m equivalence.witnesses.serve_steps ROOT CASES OUT`.

CASES has one case of a model a line, as JSON; OUT becomes what each rank ended up with, by torch.save of plain values. Nothing of
megatron is imported before ROOT stands first on the path; a ROOT of `installed` leaves the path alone. Production's data path is not
entered, so that a version serves on which production itself does not run.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from equivalence.cases.step import ModelCase
from equivalence.witnesses.serve import import_halves

INSTALLED = "installed"
"""In place of ROOT: the version that this Python has."""
TRAINERS = "equivalence.trainers.production_step"


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases, layout by layout, and write what came of them."""
    root, cases_file, out = sys.argv[1:] if argv is None else argv
    lines = Path(cases_file).read_text(encoding="utf-8").splitlines()
    cases = [ModelCase.from_json(line, where=f"{cases_file}, line {number}") for number, line in enumerate(lines, 1)]
    if root != INSTALLED:
        import_halves(root)
    # Without the commit behind `+`: megatron-core takes that of whatever repository its folder lies in.
    version = str(importlib.import_module("megatron.core").__version__).partition("+")[0]
    torch.save({"version": version, "results": list(_results(cases))}, out)


def _results(cases: Sequence[ModelCase]) -> Iterator[dict[str, Any]]:
    """Yield each case's result: `ranks`, or `failed` with the first rank's complaint."""
    from equivalence.workers import (  # noqa: PLC0415 - they fork what has the path already
        Case,
        WorldNotOpened,
        preload,
        reopening_world,
    )

    preload("equivalence.trainers.megatron_step", "production.model.device.shim", "production.model.model", TRAINERS)
    for (sizes, count), alike in itertools.groupby(cases, key=lambda case: (case.sizes, case.world_size)):
        with reopening_world(count, enter=f"{TRAINERS}:baseline_layout", entry=sizes) as world:
            for case in alike:
                try:
                    done = world.run(Case(target=f"{TRAINERS}:run_baseline", payload=case, deadline_s=300.0))
                except WorldNotOpened as failed:
                    yield {"failed": _complaint(failed.failure)}
                    continue
                yield (
                    {"failed": _complaint(done.failure)}
                    if done.failure is not None
                    else {"ranks": [_plain(each) for each in done.results or ()]}
                )


def _plain(outcome: Any) -> dict[str, Any]:
    """Return a RankOutcome as what torch.load takes with `weights_only`."""
    fields = {each.name: getattr(outcome, each.name) for each in dataclasses.fields(outcome)}
    fields["place"] = dataclasses.asdict(outcome.place)
    fields["gradients"] = [
        {each.name: getattr(part, each.name) for each in dataclasses.fields(part)} for part in outcome.gradients
    ]
    return fields


def _complaint(failure: Any) -> str:
    return f"rank {failure.first.rank} {failure.first.how}"


if __name__ == "__main__":
    main()
