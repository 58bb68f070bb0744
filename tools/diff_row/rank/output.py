"""Write the trace of a row to a rank for machines: `--json`, and every tensor of every step with `--write-dump`.

JSON, schema `packproof.diff_row.ranks/1`: `equal`; `row` (as `tools.diff_row.render.json_output` describes it); `place` (rank, tp, cp, dp,
pp, the rank's place in each, stage); `layout`, `depths`, `ways` (side to who made its share), `notes`; `segments`, a list: number,
start, end, runs (pairs [start, end) of positions that the rank owns); `steps`, a list: step, depth, about, rules, note, sides
(tensor to dtype and shape, or kind and message of a refusal), equal, differences (left, right, tensor, count, place, position,
right_position, left_value, right_value, cause); `followed`, a list: what each side has of one position at each step. With `--fed`
also `fed`: folder, normalization, looked_at (rank, microbatch, file, row from 0, line from 1, equal, first).

In a dump tensors are called `STEP/SIDE/TENSOR`; `STEP/origin` are the positions of the row that its places hold.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.diff_row.rank.compare_dump import FedFindings
from tools.diff_row.rank.ownership import Followed, follow, owned_runs
from tools.diff_row.rank.steps import ABOUT, RankFindings, Refused, Step
from tools.diff_row.render import json_output

SCHEMA = "packproof.diff_row.ranks/1"


def as_json(findings: RankFindings, fed: FedFindings | None = None) -> str:
    """Return the findings as JSON text, ASCII only."""
    described = describe(findings)
    if fed is not None:
        described["equal"] = fed.equal
        described["fed"] = {
            "folder": fed.folder,
            "normalization": fed.normalization,
            "looked_at": [dataclasses.asdict(each) for each in fed.looked_at],
        }
    return json.dumps(json_output.finite(described), indent=1, ensure_ascii=True, allow_nan=False, default=str)


def describe(findings: RankFindings) -> dict[str, Any]:
    """Return the findings as plain values, as the module says."""
    place = findings.place
    return {
        "schema": SCHEMA,
        "equal": findings.equal,
        "row": json_output.describe(findings.row),
        "place": dataclasses.asdict(place)
        | {
            "tensor_rank": place.tensor_rank,
            "context_rank": place.context_rank,
            "data_rank": place.data_rank,
            "pipeline_rank": place.pipeline_rank,
            "stage": place.stage,
        },
        "layout": findings.layout,
        "depths": findings.depths,
        "ways": dict(findings.ways),
        "notes": list(findings.notes),
        "segments": [
            {"number": each.number, "start": each.start, "end": each.end, "runs": [list(run) for run in each.runs]}
            for each in owned_runs(findings)
        ],
        "first": None if findings.first is None else findings.first.label,
        "steps": [_step(step) for step in findings.steps],
        "followed": [_followed(each) for each in follow(findings)],
    }


def write_steps(path: Path, findings: RankFindings) -> None:
    """Write every tensor of every side at every step to one safetensors file. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for step in findings.steps:
        name = step.label.replace(", ", "_").replace(" ", "_")
        if step.origin is not None:
            tensors[f"{name}/origin"] = step.origin
        for side, has in step.sides.items():
            if not isinstance(has, Refused):
                tensors |= {f"{name}/{side}/{tensor}": value for tensor, value in has.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copies: views of one memory cannot be saved, and at cp 1 a share is a view of its row.
    apart = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(apart, str(path), metadata={"packproof": "the way of a row to a rank", "rank": str(findings.place.rank)})


def _step(step: Step) -> dict[str, Any]:
    about, rules = ABOUT[step.name]
    return {
        "step": step.name,
        "depth": step.depth,
        "about": about,
        "rules": rules,
        "note": step.note,
        "equal": not step.differences,
        "sides": {
            side: {"kind": has.kind, "message": has.message}
            if isinstance(has, Refused)
            else {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in has.items()
            }
            for side, has in step.sides.items()
        },
        "differences": [dataclasses.asdict(each) for each in step.differences],
    }


def _followed(followed: Followed) -> dict[str, Any]:
    return {
        "step": followed.step.label,
        "place": followed.place,
        "values": {side: dict(values) for side, values in followed.values.items()},
    }
