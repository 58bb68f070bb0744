"""Define a job: one piece of a run, small enough for a few seconds of one worker, and deterministic by its own
fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivalence.generators.models import Layout
from equivalence.runner.restriction import EVERYTHING, Restriction


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of a run."""

    kind: str
    """One of RUNNERS."""
    subjects: tuple[str, ...]
    prompt_format: str = ""
    seed: int = 0
    examples: int = 0
    plain: int = 0
    """Of `layouts`: draws of plain random numbers beside the `examples` of Hypothesis."""
    aim: str | None = None
    """The fault class of `rows`, the check of `layouts`, the kind of model of `trainer`, the path of `whole_run`, the outcomes of `recorded`."""
    paths: tuple[str, ...] = ()
    """Saved cases of any kind; or the packed file of `sample`, the folder of `files`."""
    tokenizer: str = ""
    semantics: str = ""
    context_parallel_size: int = 1
    pack_length: int = 0
    first: int = 0
    """Of `sample`: the first row, then every `step`th, `examples` in all. Of `recorded`: the first outcome. Of `trainer` and
    `whole_run`: the number of ranks, 0 for a few layouts."""
    step: int = 1
    layout: Layout | None = None
    """Of `models`."""
    counts: tuple[int, ...] = ()
    """Of `models`: cases for each of `equivalence.cases.step.CHECKS`; `examples` in all, and `first` says which of AIMS the first one has."""
    is_own: bool = False
    """Of `sample`: whether the settings are the file's own, so that its rows count as compared."""
    restriction: Restriction = EVERYTHING
    """Of `rows` and `batches`: what drawn cases are moved into. A job of other settings is not planned."""
    shrink: bool = True
    """Whether what differs is made small; the kill matrix only asks whether anything does."""

    @property
    def check(self) -> str:
        """Return the check, by its name in the registry, to which the job's time is counted."""
        if self.kind == "layouts":
            return self.aim or ""
        if self.kind == "sample" and self.is_own:
            return "own"
        return {"smallest": "divergences"}.get(self.kind, self.kind)

    @property
    def title(self) -> str:
        """Return the job's title for people."""
        parts = (
            "own" if self.kind == "sample" and self.is_own else self.kind,
            self.aim or "",
            self.prompt_format,
            self.semantics,
            self.layout.name if self.layout else "",
        )
        return " ".join(part for part in parts if part) + (f" seed {self.seed}" if self.seed else "")
