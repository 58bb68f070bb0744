"""Sides with known faults, for the tests of diff_row: each is the reference's row, changed in one way."""

import json
from dataclasses import replace

import torch

from equivalence.cases.row import RowCase
from equivalence.subjects import Refusal, Row, RowSettings, load

REFERENCE = load("reference")


class Side:
    def __init__(self, change, **settings):
        self.name = "fake"
        self.change = change
        self.settings = settings

    def build_row(self, messages, tokenizer, settings):
        row = REFERENCE.build_row(messages, tokenizer, settings.replace(**self.settings))
        return row if row.refusal else self.change(row)

    def collate(self, rows, settings):
        return REFERENCE.collate(rows, settings)


def changed(tensor, position, value):
    def change(row):
        values = getattr(row, tensor).clone()
        values[position] = value
        return replace(row, **{tensor: values})

    return change


def shifted_twice(row):
    return replace(row, target_ids=torch.cat([row.target_ids[1:], row.target_ids[-1:]]))


def raising(_):
    raise RuntimeError("two\nlines")


SAME = Side(lambda row: row)
TOKEN = Side(changed("input_ids", 7, 99))
ARABIC = Side(changed("input_ids", 7, 1280))
"""A letter from right to left, under the tokenizer nemotron-mini."""
POSITION = Side(changed("position_ids", 3, 5))
MASK = Side(changed("token_mask", 2, 0.0))
NAN = Side(changed("token_mask", 2, float("nan")))
SHIFTED = Side(shifted_twice)
LEAKY = Side(lambda row: row, semantics="megatron-lm-0.19,boundary_label=ignore")
UNPADDED = Side(lambda row: row, context_parallel_size=1)
LONGEST = Side(lambda row: replace(row, max_seqlen=row.max_seqlen + 1))
RAISING = Side(raising)
REFUSING = Side(lambda _: Row(refusal=Refusal(kind="role_order", message="no\x1b[31m thanks", conversation=1, turn=2)))
SHORT = Side(lambda row: row, pack_length=20)


def words(first, count):
    return " ".join(f"w{number % 100}" for number in range(first, first + count))


def conversation(first, lengths=(3, 3, 4)):
    """System, user and assistant turns of words that count on; each ends in a space, so that they never merge."""
    messages = []
    for role, length in zip(("system", "user", "assistant"), lengths, strict=True):
        messages.append({"role": role, "content": words(first, length) + " "})
        first += length
    return messages


def many(count, lengths=(3, 3, 4)):
    return [message for number in range(count) for message in conversation(number * sum(lengths), lengths)]


def write_case(folder, messages, *, tokenizer="word", **settings):
    settings = {"pack_length": 32, "prompt_format": "identity", **settings}
    case = RowCase(messages=tuple(messages), settings=RowSettings(**settings), tokenizer=tokenizer)
    path = folder / "case.json"
    path.write_text(case.to_json())
    return str(path)


def write_rows(folder, rows):
    path = folder / "rows.jsonl.packed"
    path.write_text("".join(json.dumps({"messages": list(row)}) + "\n" for row in rows))
    return str(path)


def described(run, *arguments):
    """The exit status and what machines get; beside it there are notes alone."""
    status, out, err = run(*arguments, "--json")
    assert [line for line in err.splitlines() if not line.startswith("note: ")] == []
    return status, json.loads(out)
