"""List all checks: the name of each, its kind of case, the cost of a case, and the class of a difference.

Everything that lists checks (plan, jobs, counters, reports, kill matrices) reads this table. A new check is one entry here, and an entry in the module that runs
its kind: `runner/layout_jobs.py` (`data`), `runner/step_runs.py` (`step`), `runner/row_cases.py` (`row`),
`runner/job_runners.py` (others). CONTRIBUTING.md, "Add a check", has the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["row", "data", "step", "run", "files"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check."""

    name: str
    title: str
    """Readable name of its cases."""
    kind: Kind
    """`row`: messages that subjects build; `data`: drawn tensors and numbers; `step`: one training step of ranks; `run`: many steps; `files`: bytes on disk."""
    difference_kind: str
    """The class of a difference in a tensor whose name says none."""
    cost: float = 0.0
    """Of one example in generated rows' worth; 0 where the number of ranks decides, or a job is one piece."""

    replay: str = ""
    """`module:function` from a saved value to its result, of a check that draws no data and saves a value all the same."""


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(name="corpus", title="saved cases", kind="row", difference_kind="row"),
        Check(
            name="recorded",
            title="recorded outcomes",
            kind="row",
            difference_kind="row",
            cost=0.7,
            replay="equivalence.checks.rows.recorded:check_recorded",
        ),
        Check(name="first_look", title="first look at own settings", kind="row", difference_kind="row", cost=2.0),
        Check(name="own", title="own settings", kind="row", difference_kind="row", cost=5.5),
        Check(
            name="files",
            title="file readers",
            kind="files",
            difference_kind="reader",
            replay="equivalence.checks.input.files:check_file_layer",
        ),
        Check(name="sample", title="other settings", kind="row", difference_kind="row", cost=5.5),
        Check(name="rows", title="generated rows", kind="row", difference_kind="row", cost=1.0),
        Check(name="batches", title="batches", kind="row", difference_kind="batch", cost=1.5),
        Check(name="divergences", title="divergences", kind="row", difference_kind="row", cost=4.0),
        Check(name="context_parallel", title="cp cuts", kind="data", difference_kind="cut", cost=1.4),
        Check(name="multi_token", title="MTP depths", kind="data", difference_kind="depth", cost=1.4),
        Check(name="packing", title="packers", kind="data", difference_kind="bins", cost=1.4),
        Check(
            name="direct_microbatches", title="direct microbatches", kind="data", difference_kind="microbatch", cost=1.4
        ),
        Check(
            name="online_microbatches", title="online microbatches", kind="data", difference_kind="microbatch", cost=1.4
        ),
        Check(
            name="direct_vs_online", title="direct and online rows", kind="data", difference_kind="microbatch", cost=1.4
        ),
        Check(name="loss", title="losses", kind="data", difference_kind="loss", cost=1.4),
        Check(name="online_loss", title="online losses", kind="data", difference_kind="loss", cost=1.4),
        Check(name="cross_entropy", title="cross entropies", kind="data", difference_kind="loss", cost=1.4),
        Check(name="order", title="data order", kind="data", difference_kind="order", cost=1.4),
        Check(name="dp_sharding", title="stride and bins", kind="data", difference_kind="share", cost=1.4),
        Check(name="guards", title="guards of batches", kind="data", difference_kind="guard", cost=1.4),
        Check(name="loader", title="batches of the loader", kind="data", difference_kind="batch", cost=1.4),
        Check(name="packed_files", title="packed files", kind="data", difference_kind="reader", cost=1.4),
        Check(name="models", title="training steps", kind="step", difference_kind="step"),
        Check(name="third_witness", title="steps of Megatron-LM", kind="step", difference_kind="step"),
        Check(name="invariance", title="steps in other layouts", kind="step", difference_kind="step"),
        Check(name="leaks", title="leaks across boundaries", kind="step", difference_kind="leak"),
        Check(name="paths", title="direct and online steps", kind="step", difference_kind="step"),
        Check(name="trainer", title="runs of twenty steps", kind="run", difference_kind="run", cost=1000.0),
        Check(
            name="whole_run",
            title="whole runs of the job",
            kind="run",
            difference_kind="run",
            cost=1000.0,
            replay="equivalence.runner.whole_run_jobs:check_case",
        ),
        Check(name="distributed_optimizer", title="distributed optimizer", kind="run", difference_kind="run"),
    )
}
"""By name, in the order of the report."""


def names(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the checks of these kinds, in order."""
    return tuple(check.name for check in CHECKS.values() if check.kind in kinds)
