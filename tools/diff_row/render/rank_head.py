"""Collect what the page of a rank says above the tokens: the rank among all, what it owns of the row, and every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tools.diff_row.rank.coordinates import RankPlace, find_place
from tools.diff_row.rank.steps import ABOUT, RankFindings, Refused, Step, StepDifference, owned_runs
from tools.diff_row.tokens import value_and_text

MOST_RANKS = 512
"""Ranks that are drawn."""
MOST_RUNS = 4000
"""Runs of the row that are drawn."""


def first_shown(steps: Sequence[Step]) -> int:
    """Return the index of the step that the page shows first: the first that differs, else the share, else the last."""
    wanted = next((step for step in steps if step.differences), None) or next(
        (step for step in steps if step.name == "share"), steps[-1]
    )
    return steps.index(wanted)


def rank_head(findings: RankFindings) -> dict[str, Any]:
    """Return what the page says of the rank above the tokens."""
    place = findings.place
    strip, edges = _strip(findings)
    return {
        "place": place,
        **_grid(place),
        "owned": findings.owned,
        "notes": findings.notes,
        "strip": strip,
        "edges": edges,
        "has_slices": place.tp > 1 and place.sequence_parallel,
        "sides": [side.name for side in findings.row.sides],
        "steps": [_step(step, findings) for step in findings.steps],
    }


def _grid(place: RankPlace) -> dict[str, Any]:
    """Return the ranks as padded batches: a line for each pp and dp, in it cp after cp, each with its tp ranks side by side."""
    if place.ranks > MOST_RANKS or place.ranks == 1:
        return {"ranks": [], "grid_width": 0, "grid_height": 0, "grid_labels": []}
    ranks, labels = [], []
    for number in range(place.ranks):
        other = find_place(tp=place.tp, cp=place.cp, dp=place.dp, pp=place.pp, rank=number)
        same = (other.context_rank, other.data_rank) == (place.context_rank, place.data_rank)
        line = other.pipeline_rank * place.dp + other.data_rank
        x = 76 + other.context_rank * (place.tp * 25 + 8) + other.tensor_rank * 25
        y = 16 + line * 22
        ranks.append(
            {
                "number": number,
                "x": x,
                "y": y,
                "kind": "here" if number == place.rank else "same" if same else "other",
                "place": f"tp {other.tensor_rank} · cp {other.context_rank} · dp {other.data_rank} · pp {other.pipeline_rank}",
            }
        )
        if other.tensor_rank == 0 and line == 0:
            labels.append({"x": x, "y": 11, "text": f"cp {other.context_rank}"})
        if other.tensor_rank == 0 and other.context_rank == 0:
            labels.append({"x": 0, "y": y + 13, "text": f"pp {other.pipeline_rank} · dp {other.data_rank}"})
    width = 76 + place.cp * (place.tp * 25 + 8)
    return {"ranks": ranks, "grid_width": width, "grid_height": 18 + place.pp * place.dp * 22, "grid_labels": labels}


def _strip(findings: RankFindings) -> tuple[list[dict[str, Any]], list[float]]:
    """Return what the rank owns of the row, as runs of a line 1,000 wide; what its tp slice holds has a kind of its own."""
    share, total = findings.share, findings.row.length
    segments = owned_runs(findings)
    if share is None or share.origin is None or sum(len(each.runs) for each in segments) > MOST_RUNS:
        return [], []
    held = torch.zeros(total, dtype=torch.bool)
    origin = next((step.origin for step in findings.steps if step.name == "slice" and not step.depth), share.origin)
    held[origin if origin is not None else share.origin] = True
    runs = []
    for each in segments:
        for start, end in each.runs:
            inside = held[start:end]
            edges = [0, *((inside[1:] != inside[:-1]).nonzero().reshape(-1) + 1).tolist(), end - start]
            for first, last in itertools.pairwise(edges):
                runs.append(
                    {
                        "x": round((start + first) / total * 1000, 3),
                        "width": round((last - first) / total * 1000, 3),
                        "kind": "held" if bool(inside[first]) else "owned",
                        "title": f"positions {start + first:,}..{start + last:,}, segment {each.number}",
                    }
                )
    return runs, [round(each.end / total * 1000, 3) for each in segments[:-1]]


def _step(step: Step, findings: RankFindings) -> dict[str, Any]:
    names = [side.name for side in findings.row.sides]
    about, rules = ABOUT[step.name]
    refusals = {has.message for has in step.sides.values() if isinstance(has, Refused) and has.kind is not None}
    return {
        "label": step.label,
        "first": step is findings.first,
        "holds": step.shape,
        "marks": [_mark(step, name, names[0]) for name in names],
        "about": f"{about}; {step.note}" if step.note else about,
        "rules": rules,
        "differences": [_line(each, findings) for each in step.differences],
        "refusals": sorted(refusals),
    }


def _mark(step: Step, name: str, base: str) -> dict[str, str]:
    verdict, count = step.verdict(name)
    equal = "·" if name == base else "equal"
    return {"kind": verdict, "text": {"none": "–", "different": f"≠ {count:,}", "equal": equal}.get(verdict, verdict)}


def _line(found: StepDifference, findings: RankFindings) -> dict[str, Any]:
    where = "" if found.place is None else f"place {found.place:,}"
    if found.position is not None:
        told = findings.row.map.place(found.position)
        where += f" = position {found.position:,} of the row" + (f" (conversation {told})" if told else "")
    left, right = (
        " ".join(filter(None, value_and_text(found.tensor, value, findings.row.texts)))
        for value in (found.left_value, found.right_value)
    )
    return {
        "tensor": found.tensor,
        "count": found.count,
        "side": found.right,
        "where": where,
        "left": left,
        "right": right,
        "cause": "" if found.cause == "differs" else found.cause,
    }
