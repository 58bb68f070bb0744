"""Cases that a packing function is judged on: checked-in test vectors, and cases drawn from a seed.

A case is what the function is called with. Vectors also have the row of each preset, or its refusal.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

FORMAT = 1
"""Version of the vectors' format. Another version is refused."""
FOLDER = Path(__file__).resolve().parent / "vectors"
"""Where the checked-in vectors lie."""
SETS = ("valid", "divergent", "refused")
"""Sets of vectors: every preset builds the same row; presets build different rows; a preset refuses."""
DRAWN = "drawn"
FIRST_TOKEN = 12
"""Ids of drawn tokens are from here on; the word-level tokenizer of the suite has a word for each."""
TOKENS = 100


class VectorsError(ValueError):
    """Vectors or answers that cannot be used; the text says what, where and how to fix it."""


@dataclass(frozen=True)
class Case:
    """One call of a packing function."""

    id: str
    set: str
    """One of SETS, or `drawn`."""
    conversations: tuple[Mapping[str, list[int]], ...]
    """Each `{"tokens": […], "trained": […]}`; `trained[i]` is 1 where token i counts as a label."""
    pack_length: int
    pad_id: int
    eos_id: int
    context_parallel_size: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    """By preset: the fields of its row, or `{"refusal": kind}`. Empty for a drawn case."""

    @property
    def granularity(self) -> int:
        """2·cp, or 1 where nothing is padded within the row."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def must_be_built(self) -> bool:
        """Return whether a refusal of this case is a fault."""
        return self.set != "refused"

    def arguments(self) -> tuple[list[dict[str, list[int]]], int, int, int, int]:
        """Return the arguments of `pack`, copied, so that a function may change them."""
        conversations = [{name: list(values) for name, values in each.items()} for each in self.conversations]
        return conversations, self.pack_length, self.pad_id, self.eos_id, self.context_parallel_size

    def question(self) -> dict[str, Any]:
        """Return the case as JSON, without the expected rows."""
        return {
            "id": self.id,
            "set": self.set,
            "meta": dict(self.meta),
            "conversations": [dict(each) for each in self.conversations],
            "pack_length": self.pack_length,
            "pad_id": self.pad_id,
            "eos_id": self.eos_id,
            "context_parallel_size": self.context_parallel_size,
        }

    def changed(self, **changes: Any) -> Case:
        """Return the case with some values changed, without expected rows, which are no longer its own."""
        return replace(self, expected={}, **changes)


def case_of(read: Mapping[str, Any], where: str = "the case") -> Case:
    """Return the case of one JSON object. VectorsError names what is missing."""
    try:
        return Case(
            id=str(read.get("id", "case")),
            set=str(read.get("set", DRAWN)),
            conversations=tuple(
                {"tokens": list(each["tokens"]), "trained": list(each["trained"])} for each in read["conversations"]
            ),
            pack_length=int(read["pack_length"]),
            pad_id=int(read["pad_id"]),
            eos_id=int(read["eos_id"]),
            context_parallel_size=int(read["context_parallel_size"]),
            meta=read.get("meta", {}),
            expected=read.get("expected", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VectorsError(
            f"{where} is not a case: {error}; it needs conversations with tokens and trained, pack_length, pad_id, eos_id and "
            "context_parallel_size"
        ) from error


def load_vectors(folder: Path | None = None) -> list[Case]:
    """Return all vectors of a folder (default: those that are shipped), after comparing their checksum. Raises VectorsError."""
    return [case_of(json.loads(line), "a vector") for line in read_lines(folder or FOLDER, "vectors.jsonl")]


def manifest(folder: Path | None = None) -> dict[str, Any]:
    """Return the manifest of a folder of vectors. VectorsError where there is none, or one of another format."""
    path = (folder or FOLDER) / "manifest.json"
    if not path.is_file():
        raise VectorsError(f"{path}: no such file; write the vectors with `packproof vectors OUT`")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not {"presets", "sha256", "sets"} <= set(found):
        raise VectorsError("%s is not a manifest of vectors; write the vectors again" % path)
    if found.get("format") != FORMAT:
        raise VectorsError(
            "%s has format %r, this packproof reads %d; write the vectors again" % (path, found.get("format"), FORMAT)
        )
    return found


def read_lines(folder: Path, name: str) -> list[str]:
    """Return the lines of one file of vectors, packed (`.gz`) or not. VectorsError where it is not the file of the manifest."""
    packed, unpacked = folder / (name + ".gz"), folder / name
    if not packed.is_file() and not unpacked.is_file():
        raise VectorsError(f"{unpacked}: no such file; write the vectors with `packproof vectors OUT`")
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else unpacked.read_bytes()
    wanted = manifest(folder)["sha256"].get(name)
    if hashlib.sha256(content).hexdigest() != wanted:
        raise VectorsError(f"{folder}: {name} is not the file that manifest.json names; write the vectors again")
    return content.decode("utf-8").splitlines()


def drawn_cases(count: int, seed: int = 0) -> list[Case]:
    """Return `count` cases drawn from a seed; the same seed draws the same cases with every Python from 3.8 on.

    Drawn conversations have at least one token, and the pack length divides as context parallelism wants it. Tokens do not repeat
    within a case, except for the pad id, which one case in four has among its tokens.
    """
    return [
        _draw(random.Random("packproof %d %d" % (seed, number)), "drawn-%d-%04d" % (seed, number))  # noqa: S311 - cases, no secrets
        for number in range(count)
    ]


def _draw(draws: random.Random, name: str) -> Case:
    size = (1, 1, 1, 2, 2, 3, 4, 8)[draws.randrange(8)]
    granularity = 2 * size if size > 1 else 1
    longest = (3, 6, 12)[draws.randrange(3)]
    lengths = [1 + draws.randrange(longest) for _ in range(1 + draws.randrange(6))]
    while sum(lengths) > TOKENS:
        lengths.pop()
    tokens = list(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS))
    for at in range(len(tokens) - 1, 0, -1):
        other = draws.randrange(at + 1)
        tokens[at], tokens[other] = tokens[other], tokens[at]
    pad_id = (0, 0, 3, 2)[draws.randrange(4)]
    conversations = []
    for length in lengths:
        taken, tokens = tokens[:length], tokens[length:]
        conversations.append({"tokens": taken, "trained": _draw_trained(draws, length)})
    if draws.randrange(4) == 0:
        chosen = conversations[draws.randrange(len(conversations))]["tokens"]
        if len(chosen) > 2:  # neither its first nor its last token, where padding could be meant as well
            chosen[1 + draws.randrange(len(chosen) - 2)] = pad_id
    padded = [-(-length // granularity) * granularity for length in lengths]
    total, room = sum(padded), max(padded)
    pack_length = (
        total,
        total + granularity,
        total + 3 * granularity,
        room,
        room + granularity,
        room + 2 * granularity,
    )[draws.randrange(6)]
    return Case(name, DRAWN, tuple(conversations), pack_length, pad_id, 2, size)


def _draw_trained(draws: random.Random, length: int) -> list[int]:
    kind = draws.randrange(4)
    if kind < 2:
        return [1] * length
    if kind == 2:
        prompt = draws.randrange(length + 1)
        return [int(at >= prompt) for at in range(length)]
    return [draws.randrange(2) for _ in range(length)]


def questions(cases: Sequence[Case]) -> str:
    """Return cases as JSON lines, one question a line."""
    return "".join(json.dumps(case.question(), separators=(",", ":"), sort_keys=True) + "\n" for case in cases)
