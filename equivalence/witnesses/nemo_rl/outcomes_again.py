"""Make recorded outcomes anew with a checkout, in memory or as the files of `equivalence/recorded`."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from equivalence.generators import tokenizers
from equivalence.recorded import outcomes
from equivalence.recorded.outcomes import RecordedBatch, RecordedRow
from equivalence.subjects.protocol import ROW_TENSORS, Row
from equivalence.witnesses.nemo_rl.rows import Rows
from equivalence.witnesses.nemo_rl.sides import BatchSide, ConversationSide, PackerSide
from equivalence.witnesses.nemo_rl.stand_ins import CheckoutModules


def again(part: str, modules: CheckoutModules) -> Callable[[Any], Any]:
    """Return the function that replaces the outcome of a recorded case by what the checkout makes of its input."""
    made: Mapping[str, Callable[[CheckoutModules], Callable[[Any], Any]]] = {
        "rows": _rows,
        "batches": _batches,
        "packers": _packers,
        "conversations": _conversations,
    }
    return made[part](modules)


def _rows(modules: CheckoutModules) -> Callable[[RecordedRow], RecordedRow]:
    side = Rows(modules)

    def remake(recorded: RecordedRow) -> RecordedRow:
        case = recorded.case
        tokenizer = tokenizers.load(case.tokenizer)
        return dataclasses.replace(recorded, outcome=side.build_row(case.messages, tokenizer, case.settings))

    return remake


def _batches(modules: CheckoutModules) -> Callable[[RecordedBatch], RecordedBatch]:
    side = BatchSide(modules)

    def remake(recorded: RecordedBatch) -> RecordedBatch:
        batch, padded = side.batches(recorded)
        return dataclasses.replace(recorded, batch=_tensors(batch), padded=_tensors(padded))

    return remake


def _packers(modules: CheckoutModules) -> Callable[[outcomes.Packing], outcomes.Packing]:
    side = PackerSide(modules)

    def remake(packing: outcomes.Packing) -> outcomes.Packing:
        bins = side.bins(packing)
        return dataclasses.replace(packing, bins=None if bins is None else tuple(map(tuple, bins)))

    return remake


def _conversations(
    modules: CheckoutModules,
) -> Callable[[outcomes.RecordedConversation], outcomes.RecordedConversation]:
    side = ConversationSide(modules)
    return lambda recorded: dataclasses.replace(recorded, **side.sequence(recorded))


def _tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def record(modules: CheckoutModules, folder: Path) -> dict[str, bool]:
    """Write the recorded files of NeMo-RL anew, of the inputs that they hold; return for each whether its content is as recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    remakes: Mapping[str, Callable[[CheckoutModules], Callable[[dict[str, Any]], dict[str, Any]]]] = {
        "nemorl_packers.jsonl.gz": _packer_line,
        "nemorl_rows.jsonl.gz": _row_line,
        "nemorl_overrides.jsonl.gz": _row_line,
        "nemorl_batches.jsonl.gz": _batch_line,
        "nemorl_conversations.jsonl.gz": _conversation_line,
    }
    same = {}
    for name, remake in remakes.items():
        recorded = outcomes.read_lines(name)
        lines = [remake(modules)(copy.deepcopy(line)) for line in recorded]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0))
        same[name] = lines == recorded
    return same


def _row_line(modules: CheckoutModules) -> Callable[[dict[str, Any]], dict[str, Any]]:
    side = Rows(modules)

    def remake(line: dict[str, Any]) -> dict[str, Any]:
        case = outcomes.case_of(line, outcomes.DIRECT_PRESET)
        row = side.build_row(case.messages, tokenizers.load(case.tokenizer), case.settings)
        inputs = {name: value for name, value in line.items() if name not in (*ROW_TENSORS, "max_seqlen", "refused")}
        return inputs | _row_values(row)

    return remake


def _row_values(row: Row) -> dict[str, Any]:
    if row.refusal is not None:
        return {"refused": row.refusal.kind}
    return {name: getattr(row, name).tolist() for name in ROW_TENSORS} | {"max_seqlen": row.max_seqlen}


def _packer_line(modules: CheckoutModules) -> Callable[[dict[str, Any]], dict[str, Any]]:
    side = PackerSide(modules)

    def remake(line: dict[str, Any]) -> dict[str, Any]:
        bins = side.bins(outcomes.packing_of(line))
        inputs = {name: value for name, value in line.items() if name not in ("bins", "refused")}
        return inputs | ({"refused": "ValueError"} if bins is None else {"bins": bins})

    return remake


def _batch_line(modules: CheckoutModules) -> Callable[[dict[str, Any]], dict[str, Any]]:
    side = BatchSide(modules)
    by_lines = {
        (tuple(line["lines"]), line["cp"], line["dp"]): recorded
        for line, recorded in zip(outcomes.read_lines("nemorl_batches.jsonl.gz"), outcomes.batches(), strict=True)
    }

    def remake(line: dict[str, Any]) -> dict[str, Any]:
        recorded = by_lines[tuple(line["lines"]), line["cp"], line["dp"]]
        made = dict(zip(("batch", "padded"), side.batches(recorded), strict=True))
        return line | {name: _batch_values(batch) for name, batch in made.items()}

    return remake


def _batch_values(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [value.tolist(), str(value.dtype).removeprefix("torch.")] for name, value in _tensors(batch).items()}


def _conversation_line(modules: CheckoutModules) -> Callable[[dict[str, Any]], dict[str, Any]]:
    side = ConversationSide(modules)

    def remake(line: dict[str, Any]) -> dict[str, Any]:
        sequences = ("messages", "input_ids", "token_mask")
        fields: dict[str, Any] = {name: tuple(each) if name in sequences else each for name, each in line.items()}
        made = side.sequence(outcomes.RecordedConversation(**fields))
        return line | {name: list(value) if isinstance(value, tuple) else value for name, value in made.items()}

    return remake
