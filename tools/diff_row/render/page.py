"""`--html`: one self-contained page with every token of the row as a coloured cell, drawn on a canvas.

A rank's page has the rank's head above, and a choice of steps. Arrays travel deflated in base64, sides after the first as their
difference to it: two sides of 262,144 tokens are about 2 MB, a rank with one depth about 6 MB. Nothing that the row contains is ever markup: texts travel inside the arrays or escaped.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from equivalence.report.templates import environment, read_text
from tools.diff_row.render.rank_head import first_shown, rank_head
from tools.diff_row.report import Report
from tools.diff_row.row.findings import MOST_LISTED, RULES, TOKEN_TENSORS, Findings, Found, boundary_set
from tools.diff_row.tokens import value_and_text, visible

Values = npt.NDArray[Any]

PADDED = 1
DIFFERS = {"input_ids": 2, "target_ids": 4, "token_mask": 8, "position_ids": 16, "cu_seqlens": 32}
"""Bits of `flags`: where any two sides differ in a tensor."""
BOUNDARY = 64
"""Bit of `flags`: some side has a boundary before this position."""


def render_page(report: Report) -> str:
    """Render the page as text. Raises ValueError if no side built the row."""
    if not report.row.built:
        raise ValueError("no side built the row, so a page has no token to show")
    findings, shown = report.row, 0
    views: list[dict[str, Any]] = []
    blobs: dict[str, str] = {}
    if report.rank is None:
        facts, blobs = _facts(findings)
    else:
        steps = [step for step in report.rank.steps if step.view is not None]
        shown = first_shown(steps)
        for number, step in enumerate(steps):
            assert step.view is not None
            origin = None if step.name != "share" or step.origin is None else step.origin.numpy()
            view, arrays = _facts(step.view, origin=origin)
            views.append(view | {"prefix": f"{number}-", "label": step.label})
            blobs |= {f"{number}-{name}": blob for name, blob in arrays.items()}
            findings = step.view if number == shown else findings
        facts = {"views": views, "shown": shown}
    return (
        _environment()
        .get_template("page.html")
        .render(
            findings=findings,
            views=views,
            shown=shown,
            rank=None if report.rank is None else rank_head(report.rank),
            fed=report.fed,
            equal=report.equal,
            source=findings.source,
            letters=findings.letters,
            rules=RULES,
            notes_count=sum(flaw.note for flaws in findings.flaws.values() for flaw in flaws),
            differing_positions=len(_union(findings)),
            listed=[_line(alike, findings) for alike in _alike(findings.listed)],
            is_cut=len(findings.listed) == MOST_LISTED,
            facts=Markup(_script_json(facts)),  # noqa: S704 - _script_json leaves no character that could end the script
            blobs=blobs,
            **{name: Markup(read_text(__package__, file)) for name, file in _PARTS.items()},  # noqa: S704 - our own files
        )
    )


def _facts(findings: Findings, *, origin: Values | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the data and the arrays from which a script shows one view."""
    arrays, blobs = _arrays(findings)
    if origin is not None:
        arrays["origin"], blobs["origin"] = encode(origin)
    return {
        "length": findings.length,
        "sides": [{"name": visible(side.name), "letter": findings.letters[side.name]} for side in findings.built],
        "tensors": list(TOKEN_TENSORS),
        "arrays": arrays,
        "conversations": [
            [c.start, c.end, list(map(visible, c.roles))] for c in findings.map.conversations if c.start is not None
        ],
        "boundaries": [sorted(boundary_set(side.row)) for side in findings.built],
    }, blobs


_PARTS = {"style": "page.css", "data_script": "page_data.js", "script": "page.js"}


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment of the templates beside this module."""
    made = environment(__package__)
    made.filters["visible"] = lambda value: visible(str(value))
    made.filters["count"] = lambda value: "–" if value is None else f"{value:,}"
    return made


def _script_json(value: object) -> str:
    """Return JSON for a script element: ASCII, and without a `<` that could end the element."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _arrays(findings: Findings) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the type and coding of each array, and its deflated base64, by name."""
    described: dict[str, dict[str, Any]] = {}
    blobs: dict[str, str] = {}

    def add(name: str, values: Values, *, like: str | None = None, base: Values | None = None) -> None:
        described[name], blobs[name] = encode(values, like=like, base=base)

    seen: set[int] = set()
    for tensor in TOKEN_TENSORS:
        base: Values | None = None
        for number, side in enumerate(findings.built):
            values = getattr(side.row, tensor).reshape(-1).float().numpy() if tensor == "token_mask" else None
            values = getattr(side.row, tensor).reshape(-1).numpy() if values is None else values
            add(f"{number}.{tensor}", values, like=f"0.{tensor}" if number else None, base=base)
            base = values if base is None else base
            if tensor in ("input_ids", "target_ids"):
                seen.update(int(token) for token in np.unique(values))
    add("conversation_at", _padded_to(findings.map.conversation_at, findings.length, 0))
    add("turn_at", _padded_to(findings.map.turn_at, findings.length, -1))
    add("flags", _flags(findings))
    ids = np.array(sorted(seen))
    add("text_ids", ids)
    findings.texts.learn(seen)
    texts = [findings.texts.text(int(token)) for token in ids]
    described["texts"], blobs["texts"] = {"type": "json"}, _deflated(json.dumps(texts).encode())
    return described, blobs


def encode(values: Values, *, like: str | None = None, base: Values | None = None) -> tuple[dict[str, Any], str]:
    """Return an array as its description and deflated base64, little-endian.

    `like` names an array of the same length, `base`, to which the integers are differences modulo 2^32; those that
    stand alone are differences to the value before. Both are zeros nearly everywhere, which deflate takes to nothing.
    """
    if not _fits(values):
        return {"type": "float64"}, _deflated(values.astype("<f8").tobytes())
    integers = values.astype(np.int64)
    if base is not None and len(base) == len(values) and _fits(base):
        coded = integers - base.astype(np.int64)
        return {"type": "int32", "like": like}, _deflated(coded.astype("<i4").tobytes())
    return {"type": "int32", "running": True}, _deflated(np.diff(integers, prepend=0).astype("<i4").tobytes())


def _fits(values: Values) -> bool:
    """Return whether all values are integers of 32 bits; a poisoned mask or a wild id is not."""
    whole = bool(np.all(np.isfinite(values))) and bool(np.all(values == np.floor(values)))
    return whole and (not len(values) or (values.min() >= -(2**31) and values.max() < 2**31))


def _deflated(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def _padded_to(values: Values, length: int, filling: int) -> Values:
    return np.pad(values, (0, max(0, length - len(values))), constant_values=filling)[:length]


def _flags(findings: Findings) -> Values:
    flags = np.zeros(findings.length, np.int32)
    flags[: len(findings.map.padded)][findings.map.padded] |= PADDED
    for tensor, places in findings.differing.items():
        flags[places[places < findings.length]] |= DIFFERS.get(tensor, 0)
    ends = {end for side in findings.built for end in boundary_set(side.row) if 0 < end < findings.length}
    flags[sorted(ends)] |= BOUNDARY
    return flags


def _union(findings: Findings) -> Values:
    return np.unique(np.concatenate([np.zeros(0, np.int64), *findings.differing.values()]))


def _alike(listed: Sequence[Found]) -> list[list[Found]]:
    """Group differences that look the same: the same values at the same place, on different sides."""
    groups: dict[str, list[Found]] = {}
    for found in listed:
        values = (found.position, found.tensor, found.kind, found.left_value, found.right_value)
        groups.setdefault(repr(values), []).append(found)
    return list(groups.values())


def _line(alike: Sequence[Found], findings: Findings) -> dict[str, Any]:
    """Return a row of the table of differences, with the sides that share it."""
    found = alike[0]
    tokens: Iterable[str] = ()
    if found.position is not None and found.tensor != "cu_seqlens":
        tokens = dict.fromkeys(
            findings.texts.text(int(side.row.input_ids.reshape(-1)[found.position]))
            for side in findings.built
            if side.row.input_ids is not None and found.position < side.row.input_ids.numel()
        )
    values = [
        (", ".join(dict.fromkeys(names)), *value_and_text(found.tensor, value, findings.texts))
        for names, value in (
            ([each.left for each in alike], found.left_value),
            ([each.right for each in alike], found.right_value),
        )
    ]
    where = "" if found.position is None else findings.map.place(found.position)
    return {"found": found, "token": " ≠ ".join(tokens), "where": where, "values": values}
