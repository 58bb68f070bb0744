"""Hold the options of a run and its outcome so far, from which the verdict and the exit status follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from equivalence.checks.rows.divergences import label
from equivalence.divergences import registry
from equivalence.generators.models import FEATURES, VARIES
from equivalence.runner.counters import Tally
from equivalence.runner.own_settings import OwnSettings
from equivalence.runner.restriction import EVERYTHING, Restriction
from equivalence.runner.witnesses import Witness

MOST_TIES = 0.05
"""Of training steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a run."""

    size: str
    seed: int
    shard: tuple[int, int]
    subjects: tuple[str, ...]
    workers: int
    sample: Path | None
    """None: no sample."""
    tokenizer: str
    pack_length: int | None
    """Of the sample; None: what its manifest says."""
    out: Path
    rows: int | None
    """Generated rows, rounded up to whole rounds; None: what the size says."""
    models: bool = True
    """Whether training steps are run, in worlds of up to eight ranks."""
    rows_only: bool = False
    """Whether only rows and batches are compared."""
    restriction: Restriction = EVERYTHING
    """Formats, context parallel sizes and semantics that rows are built in."""

    job: str | None = None
    """Only jobs whose title holds this."""

    @property
    def is_whole(self) -> bool:
        """Return whether no part of the plan was left to others, so that everything aimed at must have been hit."""
        return self.shard == (1, 1) and not self.restriction.is_any and self.job is None

    @property
    def holds_production(self) -> bool:
        """Return whether the run holds production to more than rows: checks of data, steps and runs, whoever builds
        rows.
        """
        return "production" in self.subjects and not self.rows_only


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a run."""

    options: Options
    witnesses: list[Witness]
    tally: Tally = field(default_factory=Tally)
    own: OwnSettings | None = None
    """The packed file and its own settings."""
    left_out: list[str] = field(default_factory=list)
    """Parts of the plan that this run leaves out, in words."""
    seconds: float = 0.0
    done: float = 0.0
    """Work done and work planned, in rows' worth; None where the plan is endless."""
    planned: float | None = None
    interrupted: bool = False
    stopped: bool = False
    """Ended early because enough differed."""

    @property
    def unhit(self) -> list[str]:
        """Return in words what was aimed at and never hit. Only a whole run must hit everything."""
        if self.interrupted or self.stopped or self.tally.errors or self.options.restriction.is_any:
            return []
        missed = [
            f"class {name} in {prompt_format}: {count} rows aimed at it, none hit"
            for (name, prompt_format), count in sorted(self.tally.aimed.items())
            if not self.tally.hits[name, prompt_format]
        ]
        if self.options.is_whole:
            fired = {entry for (entry, _), count in self.tally.fired.items() if count}
            missed += [
                f"divergence {label(each)} never fired" for each in registry.REGISTRY if label(each) not in fired
            ]
            if self.options.models and self.options.holds_production:
                missed += [
                    f"training steps with {each}: none" for each in (*FEATURES, VARIES) if not self.tally.features[each]
                ]
        cases = sum(counts["cases"] for counts in self.tally.layouts.values())
        ties = sum(counts["ties"] for counts in self.tally.layouts.values())
        if ties > MOST_TIES * max(cases, 20):
            missed.append(f"{ties} of {cases} training steps could not be compared: a router's choice within rounding")
        return missed

    @property
    def exit_code(self) -> int:
        """0 equal, 1 a difference or a class that nothing hit, 2 a side that could not run, 130 interrupted."""
        if self.interrupted:
            return 130
        if self.tally.errors:
            return 2
        return 1 if self.tally.differences or self.unhit else 0

    @property
    def verdict(self) -> str:
        """One word for it."""
        names = {0: "equal", 2: "could not run", 130: "interrupted"}
        return names.get(self.exit_code, "different" if self.tally.differences else "not exercised")

    @property
    def generated(self) -> int:
        """Generated rows, without batches and divergences."""
        return sum(count for (check, _), count in self.tally.rows.items() if check == "rows")

    @property
    def rate(self) -> float:
        """Generated rows a second: drawn, built by all sides and compared, on all workers."""
        spent = self.tally.seconds["generated"] / self.options.workers
        return self.generated / spent if spent else 0.0
