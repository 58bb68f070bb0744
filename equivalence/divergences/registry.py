"""The registry of intended divergences (R-DIVERGE-1): for each field of Semantics, what must differ between two of its values.

Each entry predicts the stricter outcome whole (every position with its value, or the refusal) from the more
permissive one, so a difference anywhere else is a finding, and so is an entry that no longer fires.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivalence.divergences import predictions
from equivalence.divergences.facts import Facts
from equivalence.subjects.protocol import Messages, Row, RowSettings, overridden
from reference.semantics import Semantics, semantics

System, User, Assistant = "system", "user", "assistant"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One behaviour that differs between two values of a field of Semantics."""

    field: str
    permissive: str
    """The value from whose outcome the other one is predicted."""
    strict: str
    why: str
    """Reason for which both values exist."""
    predict: Callable[[Facts], Row]
    """The strict outcome, from the facts of the permissive one."""
    smallest: tuple[tuple[str, str | None], ...]
    """(role, content) of the smallest row that shows it, with the word-level tokenizer of the generators."""
    settings: RowSettings
    """Of the smallest row; semantics are filled in."""
    tokenizer: str = "word"
    """The name of a tokenizer of the generators, for the smallest row."""


def _identity(pack_length: int, **more: Any) -> RowSettings:
    return RowSettings(prompt_format="identity", pack_length=pack_length, **more)


_M = ((System, "w0 "), (User, "w1 "), (Assistant, "w2 w3 "))

REGISTRY: tuple[Divergence, ...] = (
    Divergence(
        field="identity_prompt",
        permissive="trained",
        strict="masked",
        why="Megatron-LM 0.18 to 0.19.2 train the prompt in `identity`; 0.17 and main mask it.",
        predict=predictions.identity_masked,
        smallest=_M,
        settings=_identity(4),
    ),
    Divergence(
        field="boundary_label",
        permissive="next",
        strict="ignore",
        why="Megatron-LM shifts over the whole row, so a conversation's last position learns the next one's first token.",
        predict=predictions.boundaries_ignored,
        smallest=((System, "w0"), (System, "w1")),
        settings=_identity(2),
    ),
    Divergence(
        field="padding_mask",
        permissive="by_value",
        strict="by_position",
        why="Masking by value also masks a pad id that content holds, such as an unknown word.",
        predict=predictions.padding_by_position,
        smallest=((System, "w0 zzz w1"),),
        settings=_identity(4),
    ),
    Divergence(
        field="empty_conversation",
        permissive="keep",
        strict="refuse",
        why="Megatron-LM makes an empty segment, which some kernels and the direct path cannot take.",
        predict=predictions.refusing(predictions.empty_conversations),
        smallest=((System, ""), (System, "w0")),
        settings=_identity(2),
    ),
    Divergence(
        field="boundaries_beyond_pack_length",
        permissive="stop",
        strict="refuse",
        why="Megatron-LM right-fills boundaries to P + 1 entries and fails on more.",
        predict=predictions.too_many_boundaries,
        smallest=((System, "w0"), (System, ""), (System, "")),
        settings=_identity(2),
    ),
    Divergence(
        field="boundaries_beyond_pack_length",
        permissive="keep",
        strict="refuse",
        why="Megatron-LM 0.17 and 0.18 leave boundaries as they are, and fail on no number of them.",
        predict=predictions.more_boundaries_than_tokens,
        smallest=((System, "w0"), (System, ""), (System, "")),
        settings=_identity(2),
    ),
    Divergence(
        field="boundaries_beyond_pack_length",
        permissive="keep",
        strict="stop",
        why="Where boundaries are kept, conversations go on past P + 1 of them.",
        predict=predictions.stops_at_boundaries,
        smallest=((System, ""), (System, ""), (System, "w0")),
        settings=_identity(2),
    ),
    Divergence(
        field="null_content",
        permissive="nothing",
        strict="text",
        why="transformers 5 takes null keys out of a message before the template sees it; transformers 4 does not.",
        predict=predictions.nulls_as_text,
        smallest=((System, None), (User, "w1")),
        settings=_identity(4),
    ),
    Divergence(
        field="long_assistant_prefix",
        permissive="mask",
        strict="refuse",
        why="Megatron-LM masks whatever follows, also beyond the turn; the direct path refuses.",
        predict=predictions.refusing(lambda facts: predictions.long_prefixes(facts, facts.reached)),
        smallest=((User, "w0"), ("Assistant", "w1")),
        settings=RowSettings(prompt_format="nemotron-nano-v2", pack_length=8),
    ),
    Divergence(
        field="turn_rules",
        permissive="masked_formats",
        strict="no_wrap",
        why="Megatron-LM looks for the turn before the first one at the end of the conversation.",
        predict=predictions.refusing(lambda facts: predictions.turn_rules(facts, "no_wrap", facts.reached)),
        smallest=((Assistant, "w0"), (User, "w1")),
        settings=RowSettings(prompt_format="nemotron-nano-v2", pack_length=16),
    ),
    Divergence(
        field="turn_rules",
        permissive="no_wrap",
        strict="every_format",
        why="Only `strict` checks roles, order and emptiness in formats that mask nothing, and roles to the letter.",
        predict=predictions.refusing(lambda facts: predictions.turn_rules(facts, "every_format", facts.reached)),
        smallest=((User, "w0"), ("Assistant", "w1")),
        settings=_identity(4),
    ),
    Divergence(
        field="turn_rules",
        permissive="masked_formats",
        strict="every_format",
        why="Both of the two above.",
        predict=predictions.refusing(lambda facts: predictions.turn_rules(facts, "every_format", facts.reached)),
        smallest=((Assistant, "w0"), (User, "w1")),
        settings=_identity(4),
    ),
    Divergence(
        field="row_ends",
        permissive="any",
        strict="system_to_assistant",
        why="A row that does not start with a system message was cut wrong; one that does not end with an answer trains nothing at its end.",
        predict=predictions.refusing(predictions.row_ends),
        smallest=((User, "w0"), (Assistant, "w1")),
        settings=_identity(4),
    ),
    Divergence(
        field="turn_check",
        permissive="relative",
        strict="exact",
        why="Megatron-LM compares ids with numpy.allclose, which lets ids from 100,000 on be off by one.",
        predict=predictions.refusing(predictions.exact_turn_check),
        smallest=((User, "\n"), (Assistant, "ab")),
        settings=_identity(8, semantics="megatron-lm-main"),
        tokenizer="huge",
    ),
    Divergence(
        field="exact_fill",
        permissive="continue",
        strict="stop",
        why="Megatron-LM takes one more conversation into a full row and cuts it to nothing; its errors still surface.",
        predict=predictions.stops_when_full,
        smallest=((System, "w0"), (System, "w1")),
        settings=_identity(1),
    ),
    Divergence(
        field="indivisible_segment",
        permissive="keep",
        strict="refuse",
        why="Megatron-LM's library builds a last segment that context parallelism cannot cut; the kernel would lose tokens.",
        predict=predictions.refusing(predictions.indivisible),
        smallest=((System, "w0"),),
        settings=_identity(2, context_parallel_size=2),
    ),
    Divergence(
        field="default_format",
        permissive="supported",
        strict="refuse",
        why="The direct path has no format `default`.",
        predict=predictions.refusing(predictions.default_format),
        smallest=((System, "w0"),),
        settings=RowSettings(prompt_format="default", pack_length=2),
    ),
    Divergence(
        field="lost_conversations",
        permissive="allow",
        strict="refuse",
        why="All published paths lose what does not fit without a word; here a row can be refused for it.",
        predict=predictions.refusing(predictions.losses),
        smallest=((System, "w0 w1"),),
        settings=_identity(1),
    ),
    Divergence(
        field="unknown_pad_token",
        permissive="unk",
        strict="unk_early",
        why="Megatron-LM notices that it has no pad id where the row becomes a tensor; the direct path before it reads a conversation.",
        predict=predictions.refusing(predictions.missing_pad),
        smallest=((Assistant, ""),),
        settings=RowSettings(prompt_format="nemotron-nano-v2", pack_length=2),
        tokenizer="plain",
    ),
    *(
        Divergence(
            field="unknown_pad_token",
            permissive=permissive,
            strict="refuse",
            why="transformers gives the unknown id for a token that the vocabulary lacks; nobody is told.",
            predict=predictions.refusing(predictions.unknown_pad),
            smallest=((System, "w0"),),
            settings=_identity(2, pad_token="<nowhere>"),
        )
        for permissive in ("unk", "unk_early")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Change of one field on the walk from one semantics to another."""

    entry: Divergence
    permissive: str
    """Semantics by name."""
    strict: str


def steps_between(left: str, right: str) -> list[Step]:
    """Return the walk from one preset to another by single fields. Raises LookupError if the registry lacks an entry for a step."""
    values = [dataclasses.asdict(semantics(name)) for name in (left, right)]
    name, steps = left, []
    for field in dataclasses.fields(Semantics):
        before, after = values[0][field.name], values[1][field.name]
        if before == after:
            continue
        onward = overridden(name, **{field.name: after})
        for entry in REGISTRY:
            if entry.field == field.name and {entry.permissive, entry.strict} == {before, after}:
                pair = (name, onward) if entry.permissive == before else (onward, name)
                steps.append(Step(entry=entry, permissive=pair[0], strict=pair[1]))
                break
        else:
            raise LookupError(f"the registry has no entry for {field.name} between {before} and {after}; add one")
        name = onward
    return steps


def expected(step: Step, messages: Messages, tokenizer: Any, settings: RowSettings) -> tuple[Row, Row]:
    """Return the permissive outcome of a row, and the predicted strict outcome."""
    facts = Facts(messages, tokenizer, settings.replace(semantics=step.permissive))
    return facts.outcome, step.entry.predict(facts)
