"""Offer the suite's sides as packing functions: `reference`, `production` and `megatron_lm`, each under a preset.

Conversations come as tokens. A word-level tokenizer with one word for each id turns them into messages that every side tokenizes back
to the same ids: in the format `identity` with a masked prompt, what trains is the assistant's and the rest the user's.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivalence.errors import InputError
from equivalence.generators import tokenizers
from equivalence.subjects.protocol import MEGATRON_PRESETS, Row, RowSettings, Subject, overridden
from packproof_subject import Refused
from reference import context_parallel as reference_parallel
from reference.semantics import PRESETS

TOKENIZER = "word"
NOTHING = " "
"""A content that is not empty and has no token: the checks of turns want an assistant's content."""
PAD_TOKENS = {0: "<unk>", 2: "</s>", 3: "<pad>"}
"""The ids that padding may have in the tokenizer, with their tokens."""
SIDES = ("reference", "production", "megatron_lm")
CONVENTIONS = {"shift": "data", "overlong": "cut"}
"""What all sides declare."""

Conversations = Sequence[Mapping[str, Sequence[int]]]


def load(name: str) -> tuple[Callable[..., list[dict[str, Any]]], dict[str, str]]:
    """Return the packing function and the conventions of `side` or `side@preset`. InputError lists what there is."""
    side, _, preset = name.partition("@")
    preset = preset or "megatron-lm-0.19"
    if side not in SIDES or preset.partition(",")[0] not in PRESETS:
        raise InputError(
            f"no side is called {name!r}: choose one of {', '.join(SIDES)}, with @ and one of {', '.join(PRESETS)}"
        )
    if side == "megatron_lm" and preset not in MEGATRON_PRESETS:
        raise InputError(f"megatron_lm cannot be a witness of {preset!r}; choose one of {', '.join(MEGATRON_PRESETS)}")
    subject = importlib.import_module(f"equivalence.subjects.{side}").SUBJECT

    def rows(*arguments: Any) -> list[dict[str, Any]]:
        return pack(subject, preset, *arguments)

    # Whose rows L10 is about, unless the command line says so.
    rows.semantics = (preset,)  # type: ignore[attr-defined]
    return rows, dict(CONVENTIONS)


def pack(
    subject: Subject,
    preset: str,
    conversations: Conversations,
    pack_length: int,
    pad_id: int,
    eos_id: int,
    context_parallel_size: int,
) -> list[dict[str, Any]]:
    """Build one row of the conversations with a side, and return the row as one pack. Raises Refused.

    The shards come from the side's own cut. A Megatron preset reports no lost tokens, since Megatron-LM does not count them.
    """
    del eos_id
    row = subject.build_row(
        [message for each in conversations for message in messages_of(each)],
        tokenizers.load(TOKENIZER),
        settings_for(preset, pack_length, pad_id, context_parallel_size),
    )
    if row.refusal is not None:
        raise Refused(row.refusal.kind, row.refusal.message)
    found = pack_of(row)
    if context_parallel_size > 1 and divides(found["cu_seqlens"], context_parallel_size):
        index = ownership(subject.name, found["cu_seqlens"], context_parallel_size)
        names = ("input_ids", "labels", "mask", "position_ids")
        found["shards"] = [{name: [found[name][at] for at in owned] for name in names} for owned in index]
    if preset not in MEGATRON_PRESETS:
        found["lost"] = _lost(conversations, found, context_parallel_size)
    return [found]


def settings_for(preset: str, pack_length: int, pad_id: int, context_parallel_size: int) -> RowSettings:
    """Return the settings of a row of tokens: `trained` alone decides what trains, so `identity` has a masked prompt under every preset."""
    if pad_id not in PAD_TOKENS:
        raise InputError(
            f"pad_id must be one of {', '.join(map(str, PAD_TOKENS))} for the suite's own sides, got {pad_id}"
        )
    # Megatron-LM is a witness of its presets by name, and at this seam the two are one.
    semantics = "megatron-lm-main" if preset in MEGATRON_PRESETS else overridden(preset, identity_prompt="masked")
    return RowSettings(
        pack_length=pack_length,
        prompt_format="identity",
        context_parallel_size=context_parallel_size,
        semantics=semantics,
        pad_token=PAD_TOKENS[pad_id],
    )


def messages_of(conversation: Mapping[str, Sequence[int]]) -> list[dict[str, str]]:
    """Return messages that become exactly these tokens, with exactly these of them trained. InputError for an id without a word."""
    messages = [{"role": "system", "content": ""}]
    runs: list[tuple[bool, list[int]]] = []
    for token, trained in zip(conversation["tokens"], conversation["trained"], strict=True):
        if not runs or runs[-1][0] != bool(trained):
            runs.append((bool(trained), []))
        runs[-1][1].append(token)
    if not runs or runs[0][0]:
        runs.insert(0, (False, []))
    if not runs[-1][0]:
        runs.append((True, []))
    for trained, tokens in runs:
        content = "".join(f"{_word(token)} " for token in tokens)
        messages.append(
            {"role": "assistant" if trained else "user", "content": content or (NOTHING if trained else "")}
        )
    return messages


def _word(token: int) -> str:
    first = tokenizers.FIRST_WORD_ID
    if token in PAD_TOKENS:
        return PAD_TOKENS[token]
    if not first <= token < first + len(tokenizers.WORDS):
        raise InputError(
            f"token {token} has no word in the tokenizer {TOKENIZER!r}; take ids from {first} to {first + len(tokenizers.WORDS) - 1}"
        )
    return tokenizers.WORDS[token - first]


def pack_of(row: Row) -> dict[str, Any]:
    """Return a row's tensors as the fields of a pack, in plain lists."""
    assert row.input_ids is not None
    assert row.target_ids is not None
    assert row.token_mask is not None
    assert row.position_ids is not None
    assert row.cu_seqlens is not None
    return {
        "input_ids": row.input_ids.tolist(),
        "labels": row.target_ids.tolist(),
        "mask": [int(weight) for weight in row.token_mask.tolist()],
        "position_ids": row.position_ids.tolist(),
        "cu_seqlens": row.cu_seqlens.tolist(),
    }


def divides(cu_seqlens: Sequence[int], size: int) -> bool:
    """Return whether 2·cp divides every segment, so that there are shards at all (R-CP-3)."""
    return all((end - start) % (2 * size) == 0 for start, end in itertools.pairwise(cu_seqlens))


def ownership(side: str, cu_seqlens: Sequence[int], size: int) -> list[list[int]]:
    """Return the positions of each context-parallel rank, from the side's own code. R-CP-1."""
    if side == "reference":
        return [reference_parallel.owned_positions(cu_seqlens, rank, size) for rank in range(size)]
    if side == "production":
        import torch  # noqa: PLC0415

        from production.parallel.context_parallel import shard_index  # noqa: PLC0415

        boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
        return [shard_index(boundaries, rank, size, layout="zigzag").tolist() for rank in range(size)]
    from equivalence.checks.cuts.context_parallel import rotary_index  # noqa: PLC0415 - imports megatron-core

    return [rotary_index(cu_seqlens, rank, size).tolist() for rank in range(size)]


def _lost(conversations: Conversations, found: Mapping[str, Any], size: int) -> list[int]:
    """Return the conversations whose tokens are not all in the row, by R-LAYOUT-1 to R-LAYOUT-4."""
    granularity, at, lost = 2 * size if size > 1 else 1, 0, []
    length = len(found["input_ids"])
    for number, each in enumerate(conversations):
        if at + len(each["tokens"]) > length:
            lost.append(number)
        at += -(-len(each["tokens"]) // granularity) * granularity
    return lost
