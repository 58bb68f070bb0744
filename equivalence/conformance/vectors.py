"""Make the test vectors: each case with the row that the reference builds under every preset.

A row is taken only if production, and under its presets the installed Megatron-LM, build the same; likewise shards and depths.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from equivalence.checks.cuts.context_parallel import check_context_parallel
from equivalence.checks.cuts.multi_token import check_multi_token
from equivalence.checks.rows.rows import check_row
from equivalence.conformance import layouts
from equivalence.conformance.witnesses import TOKENIZER, divides, messages_of, ownership, pack_of, settings_for
from equivalence.errors import SuiteError
from equivalence.generators import tokenizers
from equivalence.subjects import load
from equivalence.subjects.protocol import MEGATRON_PRESETS, Row
from packproof.cases import FORMAT, Case
from reference import multi_token
from reference.semantics import PRESETS

SEPARATORS = (",", ":")


class VectorError(SuiteError):
    """Raised for a row on which the sides disagree; no vector is written for it."""


def generate(cases: Sequence[Case] | None = None) -> list[Case]:
    """Return the cases with their sets and expected rows. VectorError names the case on which the sides differ."""
    return [_with_rows(case) for case in (layouts.cases() if cases is None else cases)]


def _with_rows(case: Case) -> Case:
    expected = {preset: _expected(case, preset) for preset in PRESETS}
    kinds = [row.get("refusal") for row in expected.values()]
    rows = list(expected.values())
    name = "refused" if any(kinds) else "valid" if all(row == rows[0] for row in rows) else "divergent"
    return dataclasses.replace(case, set=name, expected=expected)


def _expected(case: Case, preset: str) -> dict[str, Any]:
    """Return the row that all sides build, or the refusal in which all agree."""
    settings = settings_for(preset, case.pack_length, case.pad_id, case.context_parallel_size)
    names = ["reference", "production", *(["megatron_lm"] if preset in MEGATRON_PRESETS else [])]
    result = check_row(
        [message for each in case.conversations for message in messages_of(each)],
        tokenizers.load(TOKENIZER),
        settings,
        [load(name) for name in names],
    )
    if result.findings or sorted(result.rows) != sorted(names):
        raise VectorError(f"{case.id} under {preset}: the sides differ, so no vector is written: {result.findings[:1]}")
    row = result.rows["reference"]
    if row.refusal is not None:
        return {"refusal": row.refusal.kind}
    found = pack_of(row)
    if (
        case.context_parallel_size > 1
        and divides(found["cu_seqlens"], case.context_parallel_size)
        and _none_empty(found)
    ):
        found["shards"] = _shards(case, row, found)
    if case.meta["depths"] and _none_empty(found):
        found["depths"] = _depths(case, row, found)
    return found


def _none_empty(found: dict[str, Any]) -> bool:
    """Return whether no segment is empty: production's guards take no other row to a rank."""
    return all(start < end for start, end in itertools.pairwise(found["cu_seqlens"]))


def _tensors(row: Row) -> dict[str, torch.Tensor]:
    assert row.input_ids is not None
    assert row.target_ids is not None
    assert row.token_mask is not None
    assert row.position_ids is not None
    names = ("input_ids", "target_ids", "token_mask", "position_ids")
    return dict(zip(names, (row.input_ids, row.target_ids, row.token_mask, row.position_ids), strict=True))


def _shards(case: Case, row: Row, found: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return each rank's part of the row, on whose positions reference, production and megatron-core's rotary embedding agree."""
    result = check_context_parallel(_tensors(row), found["cu_seqlens"], case.context_parallel_size)
    if result.findings:
        raise VectorError(f"{case.id}: the sides must cut the row alike, but they differ: {result.findings[:1]}")
    names = ("input_ids", "labels", "mask", "position_ids")
    index = ownership("reference", found["cu_seqlens"], case.context_parallel_size)
    return [{name: [found[name][at] for at in owned] for name in names} for owned in index]


def _depths(case: Case, row: Row, found: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return the whole row at each depth, on which reference, production and megatron-core's roll agree."""
    count = case.meta["depths"]
    size = case.context_parallel_size if divides(found["cu_seqlens"], case.context_parallel_size) else 1
    result = check_multi_token(_tensors(row), found["cu_seqlens"], size, count)
    if result.findings:
        raise VectorError(f"{case.id}: the sides must shift the row alike, but they differ: {result.findings[:1]}")
    shifted = multi_token.depths(**_tensors(row), cu_seqlens=found["cu_seqlens"], count=count)
    return [
        {
            "input_ids": each.input_ids.tolist(),
            "labels": each.target_ids.tolist(),
            "mask": [int(weight) for weight in each.token_mask.tolist()],
            "position_ids": each.position_ids.tolist() if each.position_ids is not None else [],
        }
        for each in shifted
    ]


def write(folder: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Write vectors, messages and manifest to a folder; the same cases give the same bytes. Returns the manifest."""
    vectors = "".join(line_of(case) for case in cases)
    messages = "".join(messages_line(case) for case in cases)
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "cases": len(cases),
        "sets": {name: sum(case.set == name for case in cases) for name in ("valid", "divergent", "refused")},
        "presets": list(PRESETS),
        "sha256": {},
    }
    for name, text in (("vectors.jsonl", vectors), ("messages.jsonl", messages)):
        manifest["sha256"][name] = hashlib.sha256(text.encode()).hexdigest()
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as file:
            file.write(text.encode())
        (folder / f"{name}.gz").write_bytes(packed.getvalue())
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def line_of(case: Case) -> str:
    """Return a case with its expected rows as one JSON line."""
    return (
        json.dumps(
            {**case.question(), "expected": case.expected}, sort_keys=True, separators=SEPARATORS, ensure_ascii=False
        )
        + "\n"
    )


def messages_line(case: Case) -> str:
    """Return the messages of a case as one JSON line, for a path that tokenizes: format, tokenizer and pad token are those of every case."""
    settings = settings_for("strict", case.pack_length, case.pad_id, case.context_parallel_size)
    line = {
        "id": case.id,
        "messages": [message for each in case.conversations for message in messages_of(each)],
        "prompt_format": settings.prompt_format,
        "pad_token": settings.pad_token,
    }
    return json.dumps(line, sort_keys=True, separators=SEPARATORS, ensure_ascii=False) + "\n"
