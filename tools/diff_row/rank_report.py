"""From the command line to the way of a row to a rank: builds the row on every side, places the rank, walks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from production.parallel.context_parallel import LAYOUTS
from tools.diff_row.errors import problem
from tools.diff_row.inputs import Request, build_rows, find, subject_of
from tools.diff_row.rank.coordinates import RankPlace, find_place
from tools.diff_row.rank.steps import STOPS
from tools.diff_row.rank.trace import travel
from tools.diff_row.rank.weights import GlobalBatch, weights_step
from tools.diff_row.report import Report

_MOST_DEPTHS = 1024


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """Options that choose the rank and the last step."""

    row: Request
    tp: int | None = None
    cp: int | None = None
    dp: int | None = None
    pp: int | None = None
    rank: int | None = None
    depth: int | None = None
    """K: depths of multi-token prediction."""
    stop_at: str | None = None
    """One of STOPS; if not given the share, or the slice where tp ranks have one each."""
    at: int | None = None
    """The position of the row to follow."""
    layout: str = "zigzag"
    sequence_parallel: bool = True
    global_batch_size: int | None = None
    """Rows of the global batch, for weights; dp if not given."""
    fed: Path | None = None
    """Folder of a job's dump of a step."""
    microbatch: int | None = None
    """Of the dump; None for all."""

    @property
    def is_asked(self) -> bool:
        """True if any option was given."""
        given = (self.tp, self.cp, self.dp, self.pp, self.rank, self.depth, self.stop_at, self.at, self.fed)
        return any(each is not None for each in (*given, self.global_batch_size, self.microbatch))


def find_rank(request: RankRequest) -> Report:
    """Follow the row to the rank. Raises BadInput."""
    place = find_place(
        tp=_or(request.tp, 1),
        cp=_or(request.cp, 1),
        dp=_or(request.dp, 1),
        pp=_or(request.pp, 1),
        rank=request.rank or 0,
        sequence_parallel=request.sequence_parallel,
    )
    if request.microbatch is not None:
        raise problem(
            "only a job's dump has microbatches", where="--microbatch", fix="give --fed FOLDER, or leave it out"
        )
    depths, stop_at = checked(request)
    size = request.global_batch_size
    if size is not None and stop_at != "weights":
        raise problem(
            "rows of a global batch count only for weights", where="--global-batch-size", fix="add --stop-at weights"
        )
    row = find(for_cp(request.row, place.cp))
    subjects = {side.name: subject_of(side.name) for side in row.built}
    found = travel(
        row,
        place,
        subjects=subjects,
        depths=depths,
        layout=request.layout,
        stop_at=_last_of_the_way(request) if stop_at == "weights" else stop_at,
        at=request.at,
        notes=_notes(request, place, row.settings.context_parallel_size if row.settings else None),
    )
    if stop_at == "weights" and found.share is not None:
        weights = weights_step(found, _global_batch(request, place, subjects), subjects, depths_left_out=depths > 0)
        found = replace(found, steps=(*found.steps, weights))
    return Report(row=row, rank=found)


def checked(request: RankRequest) -> tuple[int, str]:
    """Return the number of depths, and the last step. Raises BadInput for contradictory options."""
    depths = _or(request.depth, 0)
    if depths < 0:
        raise problem(f"{depths} depths", where="--depth", fix="give 1 or more, or leave it out")
    if depths > _MOST_DEPTHS:
        raise problem(
            f"{depths:,} depths", where="--depth", fix=f"give at most {_MOST_DEPTHS:,}, more than any model has"
        )
    if request.stop_at is not None and request.stop_at not in STOPS:
        raise problem(
            f"no step is called {request.stop_at!r}", where="--stop-at", fix=f"choose one of {', '.join(STOPS)}"
        )
    if request.stop_at == "depth" and depths == 0:
        raise problem(
            "there is no depth: a model without multi-token prediction shifts nothing",
            where="--stop-at depth",
            fix="give --depth K, up to the model's mtp_num_layers, or stop at microbatch or share",
        )
    if depths and request.stop_at in ("row", "batch", "microbatch"):
        raise problem(
            f"depths are made after the {request.stop_at}, so --depth {depths} would show nothing",
            where=f"--stop-at {request.stop_at}",
            fix="leave --depth out, or stop at depth or later",
        )
    if request.layout not in LAYOUTS:
        raise problem(
            f"no layout is called {request.layout!r}", where="--layout", fix=f"choose one of {', '.join(LAYOUTS)}"
        )
    return depths, request.stop_at or _last_of_the_way(request)


def _last_of_the_way(request: RankRequest) -> str:
    """Return the last step before weights: the slice if each tp rank has one, else the share."""
    return "slice" if request.sequence_parallel and _or(request.tp, 1) > 1 else "share"


def for_cp(request: Request, cp: int) -> Request:
    """Build rows for the cp of the cut, unless another cp was given."""
    if any(name == "context_parallel_size" for name, _ in request.settings):
        return request
    return replace(request, settings=(*request.settings, ("context_parallel_size", cp)))


def _notes(request: RankRequest, place: RankPlace, built_for: int | None) -> tuple[str, ...]:
    notes = []
    if built_for is not None and built_for != place.cp:
        notes.append(f"the row is built for cp {built_for} and cut for cp {place.cp}")
    row = request.row.row
    if row is not None and place.dp > 1 and row % place.dp != place.data_rank:
        other = place.rank + (row % place.dp - place.data_rank) * place.tp * place.cp
        notes.append(
            f"in sequential order row {row} goes to dp {row % place.dp} (rank {other} here), not to dp {place.data_rank}; a shuffle may bring it here"
        )
    return tuple(notes)


def _global_batch(request: RankRequest, place: RankPlace, subjects: Mapping[str, Any]) -> GlobalBatch:
    """Return the global batch of the row: G rows, from a multiple of G (R-ORDER-1)."""
    size, row = request.global_batch_size or place.dp, request.row.row
    if size % place.dp or size < 1:
        raise problem(f"{size} rows over dp {place.dp}", where="--global-batch-size", fix="give a multiple of dp")
    if row is None or request.row.file is None or request.row.dump is not None:
        raise problem(
            "weights depend on the other rows of the global batch, and a case or a dump has one row",
            where="--stop-at weights",
            fix="give FILE --row N",
        )
    first = row // size * size
    built = build_rows(for_cp(request.row, place.cp), range(first, first + size), tuple(subjects))
    return GlobalBatch(rows=built, first=first, number=row - first)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
