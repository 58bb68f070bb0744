"""`--json`: everything the screen shows, for machines. The schemas are stable; a change of one raises its number.

A row, schema `packproof.diff_row/1`:

- `schema`: `packproof.diff_row/1`; `equal`: whether the exit status is 0.
- `source`: file, row (from 0), line (from 1), case, dump, dump_row (from 0), bin (pairs of file and line: the conversations of a
  bin of the online path), settings_from (by setting, where it comes from if nobody gave it). `settings`: RowSettings by field, null if only a dump is looked at.
  `tokenizer`: its name or folder, or null.
- `sides`, a list: name, version, refusal (null, or kind, message, conversation, turn), pack_length, boundaries,
  max_seqlen, trained_tokens, report (docs/SPEC.md#report, or null), flaws (a list: what, rule, count, position, note).
- `conversations`, a list: number, roles, tokens, start, end, padding, trained, state; null for what is unknown.
- `first`: null, or left, right, tensor, class, position, left_value, right_value, where, conversation, turn, role,
  rules, and neighbourhood, a list: position, where, boundary (sides), tokens (by side), values (by tensor, then by
  side), differs (tensors).
- `pairs`, a list: left, right, equal, differences, counts (by tensor, then by class), fields (the two values of what
  differs as a whole: max_seqlen, a count of the report, a shape, a refusal).
- `differing`, by tensor: count (positions at which any two sides differ), first (at most 200 of them).

A rank, schema `packproof.diff_row.ranks/1`:

- `equal`; `row` (as above); `place` (rank, tp, cp, dp, pp, the rank's place in each, stage); `layout`, `depths`, `ways` (side to who
  made its share), `notes`; `first`: the first step that differs.
- `segments`, a list: number, start, end, runs (pairs [start, end) of positions that the rank owns).
- `steps`, a list: step, depth, about, rules, note, sides (tensor to dtype and shape, or kind and message of a refusal), equal,
  differences (left, right, tensor, count, place, position, right_position, left_value, right_value, cause).
- `followed`, a list: what each side has of one position at each step.
- With `--fed` also `fed`: folder, normalization, looked_at (rank, microbatch, file, row from 0, line from 1, equal, first).

A number that is not finite, such as a poisoned mask, stands as text: `"nan"`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from tools.diff_row.rank.steps import ABOUT, Followed, RankFindings, Refused, Step, follow, owned_runs
from tools.diff_row.render.context_window import context_window
from tools.diff_row.report import Report
from tools.diff_row.row.findings import MOST_LISTED, RULES, Findings, Side

SCHEMA = "packproof.diff_row/1"
RANK_SCHEMA = "packproof.diff_row.ranks/1"


def as_json(report: Report) -> str:
    """Return the report as JSON text, ASCII only, so that no terminal or log can garble it."""
    described = describe(report.row) if report.rank is None else _rank(report.rank) | {"equal": report.equal}
    if report.fed is not None:
        described["fed"] = {
            "folder": report.fed.folder,
            "normalization": report.fed.normalization,
            "looked_at": [dataclasses.asdict(each) for each in report.fed.looked_at],
        }
    return json.dumps(finite(described), indent=1, ensure_ascii=True, allow_nan=False, default=str)


def describe(findings: Findings) -> dict[str, Any]:
    """Return the findings as plain values, in the schema of the module's docstring."""
    return {
        "schema": SCHEMA,
        "equal": findings.equal,
        "source": dataclasses.asdict(findings.source),
        "settings": None if findings.settings is None else dataclasses.asdict(findings.settings),
        "tokenizer": findings.tokenizer,
        "sides": [_side(side, findings) for side in findings.sides],
        "conversations": [dataclasses.asdict(conversation) for conversation in findings.map.conversations],
        "first": _first(findings),
        "pairs": [
            {
                "left": pair.left,
                "right": pair.right,
                "equal": not pair.counts,
                "differences": pair.total,
                "counts": {tensor: dict(classes) for tensor, classes in pair.counts.items()},
                "fields": {name: list(values) for name, values in pair.fields.items()},
            }
            for pair in findings.pairs
        ],
        "differing": {
            tensor: {"count": len(places), "first": places[:MOST_LISTED].tolist()}
            for tensor, places in findings.differing.items()
        },
    }


def _side(side: Side, findings: Findings) -> dict[str, Any]:
    row = side.row
    return {
        "name": side.name,
        "version": side.version,
        "refusal": None if row.refusal is None else dataclasses.asdict(row.refusal),
        "pack_length": None if row.input_ids is None else row.input_ids.numel(),
        "boundaries": None if row.cu_seqlens is None else row.cu_seqlens.numel(),
        "max_seqlen": row.max_seqlen,
        "trained_tokens": None if row.token_mask is None else int((row.token_mask != 0).sum()),
        "report": None if row.report is None else dict(row.report),
        "flaws": [dataclasses.asdict(flaw) for flaw in findings.flaws.get(side.name, ())],
    }


def _first(findings: Findings) -> dict[str, Any] | None:
    first = findings.first
    if first is None:
        return None
    place = first.position if first.position is not None and first.position < len(findings.map.turn_at) else None
    turn = -1 if place is None else int(findings.map.turn_at[place])
    return {
        "left": first.left,
        "right": first.right,
        "tensor": first.tensor,
        "class": first.kind,
        "position": first.position,
        "left_value": first.left_value,
        "right_value": first.right_value,
        "where": None if place is None else findings.map.place(place),
        "conversation": None if place is None else int(findings.map.conversation_at[place]),
        "turn": turn if turn >= 0 else None,
        "role": None if place is None else findings.map.role(place),
        "rules": RULES.get(first.kind),
        "neighbourhood": []
        if first.position is None
        else [
            {
                "position": near.position,
                "where": near.where,
                "boundary": list(near.boundary),
                "tokens": dict(near.tokens),
                "values": {tensor: dict(values) for tensor, values in near.values.items()},
                "differs": sorted(near.differs),
            }
            for near in context_window(findings, first.position)
        ],
    }


def _rank(findings: RankFindings) -> dict[str, Any]:
    """Return the way of a row to a rank as plain values."""
    place = findings.place
    return {
        "schema": RANK_SCHEMA,
        "equal": findings.equal,
        "row": describe(findings.row),
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


def finite(value: Any) -> Any:
    """Replace values that JSON cannot hold by text."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
