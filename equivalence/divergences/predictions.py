"""Predict a row under the stricter value of one field of Semantics from the row under the more permissive value.

A prediction covers the whole outcome: every position with its value, or the refusal. It does not run the reference again; it derives the
change from the row's facts alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from equivalence.divergences import facts as stages
from equivalence.divergences.facts import AFTER, CONVERSATIONS, TURN_STEPS, Facts, Reached, Stage, stage_of
from equivalence.subjects.protocol import Refusal, Row, overridden
from equivalence.subjects.reference import SUBJECT
from reference import prompts
from reference.prompts import IGNORE_INDEX

Violation = tuple[Stage, str]
System, User, Assistant = "system", "user", "assistant"


def _unless_earlier(facts: Facts, violation: Violation | None) -> Row:
    """Return the violation as the outcome, unless the permissive side refuses earlier."""
    if violation is None:
        return facts.outcome
    stage, kind = violation
    refusal = facts.outcome.refusal
    if refusal is not None and stage_of(refusal, facts.messages, facts.settings) < stage:
        return facts.outcome
    return Row(refusal=Refusal(kind=kind))


def refusing(find: Callable[[Facts], Iterator[Violation]]) -> Callable[[Facts], Row]:
    """Return a prediction from violations: the first violation refuses the row."""
    return lambda facts: _unless_earlier(facts, min(find(facts), default=None))


def _relabelled(row: Row, target_ids: torch.Tensor, token_mask: torch.Tensor) -> Row:
    """Return a row with other labels and mask, and the report that follows from them."""
    assert row.report is not None
    assert row.cu_seqlens is not None
    inner = {int(boundary) for boundary in row.cu_seqlens.tolist() if 0 < boundary < len(target_ids)}
    report = {
        **row.report,
        "trained_tokens": int(token_mask.sum()),
        "boundary_labels": sum(int(token_mask[boundary - 1]) for boundary in inner),
    }
    return dataclasses.replace(row, target_ids=target_ids, token_mask=token_mask, report=report)


def identity_masked(facts: Facts) -> Row:
    """Predict `masked`: prompts become -100, and the turn checks of masked formats apply."""
    if facts.prompt.format != "identity":
        return facts.outcome
    strict = Facts(
        facts.messages,
        facts.hf,
        facts.settings.replace(semantics=overridden(facts.settings.semantics, identity_prompt="masked")),
    )
    violations = [*turn_rules(strict, strict.semantics.turn_rules, facts.reached)]
    violations += _mismatches(strict, facts.reached)
    violations += long_prefixes(strict, facts.reached) if strict.semantics.long_assistant_prefix == "refuse" else []
    outcome = _unless_earlier(facts, min(violations, default=None))
    if outcome.refusal:
        return outcome
    assert outcome.target_ids is not None
    assert outcome.token_mask is not None
    target_ids, token_mask = outcome.target_ids.clone(), outcome.token_mask.clone()
    for reached in facts.reached:
        idx = reached.start
        for message in reached.conversation:
            length = len(facts.turn_tokens(message))
            if message["role"].lower() != Assistant:
                # The label one before a prompt token is that token; positions -1 and P do not exist.
                labels = slice(max(idx - 1, 0), max(0, min(idx + length - 1, len(target_ids) - 1)))
                target_ids[labels] = IGNORE_INDEX
                token_mask[labels] = 0.0
            idx += length
    return _relabelled(outcome, target_ids, token_mask)


def boundaries_ignored(facts: Facts) -> Row:
    """Predict `ignore`: the label before each inner boundary is -100 and does not train."""
    row = facts.outcome
    if row.refusal:
        return row
    assert row.target_ids is not None
    assert row.token_mask is not None
    assert row.cu_seqlens is not None
    target_ids, token_mask = row.target_ids.clone(), row.token_mask.clone()
    for boundary in row.cu_seqlens.tolist():
        if 0 < boundary < len(target_ids):
            target_ids[boundary - 1] = IGNORE_INDEX
            token_mask[boundary - 1] = 0.0
    return _relabelled(row, target_ids, token_mask)


def padding_by_position(facts: Facts) -> Row:
    """Predict `by_position`: a pad id in content trains."""
    row = facts.outcome
    if row.refusal:
        return row
    assert row.target_ids is not None
    assert row.token_mask is not None
    pad = prompts.pad_id(facts.tokenizer, facts.prompt)
    real_pads = (row.target_ids == pad) & ~torch.tensor(facts.is_padding[1:])
    token_mask = row.token_mask.clone()
    token_mask[real_pads] = 1.0
    return _relabelled(row, row.target_ids, token_mask)


def empty_conversations(facts: Facts) -> Iterator[Violation]:
    """Yield each reached conversation of zero tokens."""
    for reached in facts.reached:
        if reached.tokens == []:
            yield (CONVERSATIONS, reached.number, AFTER, 1), "empty_conversation"


def too_many_boundaries(facts: Facts) -> Row:
    """Predict `refuse` from `stop`: conversations continue past P + 1 boundaries, and the row is refused at the end."""
    refusal = facts.outcome.refusal
    if refusal and stage_of(refusal, facts.messages, facts.settings) < (stages.NO_TOKEN,):
        return facts.outcome
    name = overridden(facts.settings.semantics, boundaries_beyond_pack_length="refuse")
    going_on = Facts(facts.messages, facts.hf, facts.settings.replace(semantics=name))
    if len(going_on.reached) == len(facts.reached):
        return facts.outcome
    if going_on.reached[-1].refused:
        return going_on.outcome
    if not any(reached.tokens for reached in going_on.reached):
        return Row(refusal=Refusal(kind="empty_row"))
    return Row(refusal=Refusal(kind="too_many_boundaries"))


def more_boundaries_than_tokens(facts: Facts) -> Row:
    """Predict `refuse` from `keep`: a row of more than P + 1 boundaries is refused once it is whole."""
    if len(facts.reached) <= facts.settings.pack_length:
        return facts.outcome
    refusal = facts.outcome.refusal
    is_later = refusal is not None and refusal.kind in ("indivisible_segment", "dropped", "truncated")
    return facts.outcome if refusal is not None and not is_later else Row(refusal=Refusal(kind="too_many_boundaries"))


def stops_at_boundaries(facts: Facts) -> Row:
    """Predict `stop` from `keep`: the row of the first P conversations alone, where more were reached."""
    length = facts.settings.pack_length
    if len(facts.reached) <= length:
        return facts.outcome
    first = [message for reached in facts.reached[:length] for message in reached.conversation]
    return Facts(first, facts.hf, facts.settings).outcome


def nulls_as_text(facts: Facts) -> Row:
    """Predict `text` from `nothing`: the row in which the word None stands where a null stood, but for answers that a masked
    format refuses.
    """
    if facts.prompt.format != "identity":
        return facts.outcome
    kept = facts.masked or facts.semantics.turn_rules == "every_format"

    def written(message: Any) -> Any:
        if not (isinstance(message, Mapping) and "content" in message and message["content"] is None):
            return message
        role = message.get("role")
        is_answer = isinstance(role, str) and role.lower() == Assistant
        return message if kept and is_answer else {**message, "content": "None"}

    return Facts([written(message) for message in facts.messages], facts.hf, facts.settings).outcome


def long_prefixes(facts: Facts, all_reached: list[Reached]) -> Iterator[Violation]:
    """Yield each assistant turn of fewer tokens than the prefix."""
    prefix = facts.prompt.assistant_prefix_len
    prefix = prompts.ASSISTANT_PREFIX[facts.prompt.format] if prefix is None else prefix
    if not facts.masked:
        return
    for reached in all_reached:
        for number, message in enumerate(reached.conversation if reached.tokens is not None else []):
            role = message["role"]
            if isinstance(role, str) and role.lower() == Assistant and prefix > len(facts.turn_tokens(message)):
                yield (CONVERSATIONS, reached.number, number, TURN_STEPS["prefix_too_long"]), "prefix_too_long"


def turn_rules(facts: Facts, rules: str, all_reached: list[Reached]) -> Iterator[Violation]:
    """Yield every fault of roles, order and emptiness under the stricter rules, even if the row has other faults."""
    if not facts.masked and rules != "every_format":
        return
    for reached in all_reached:
        if reached.tokens is None:
            continue
        roles = [message["role"] for message in reached.conversation]
        for number, (role, message) in enumerate(zip(roles, reached.conversation, strict=True)):
            stage = (CONVERSATIONS, reached.number, number)
            if not isinstance(role, str):
                yield (*stage, TURN_STEPS["bad_message"]), "bad_message"
                continue
            if rules == "every_format" and role not in prompts.ROLES:
                yield (*stage, TURN_STEPS["exact_role"]), "unknown_role"
            if role.lower() not in prompts.ROLES:
                yield (*stage, TURN_STEPS["unknown_role"]), "unknown_role"
            if role.lower() != Assistant:
                continue
            content = message.get("content")
            if not isinstance(content, (str, list, dict)):
                yield (*stage, TURN_STEPS["bad_content"]), "bad_content"
            elif not content:
                yield (*stage, TURN_STEPS["empty_assistant"]), "empty_assistant"
            wraps = number == 0 and rules == "masked_formats"
            if number == 0 and not wraps:
                yield (*stage, TURN_STEPS["role_order"]), "role_order"
            elif not isinstance(roles[number - 1], str):
                yield (*stage, TURN_STEPS["role_order"]), "bad_message"
            elif roles[number - 1].lower() not in (User, "tool"):
                yield (*stage, TURN_STEPS["role_order"]), "role_order"


def row_ends(facts: Facts) -> Iterator[Violation]:
    """Yield a violation for a row that does not run from a system to an assistant message."""
    if facts.messages:
        ends = ((facts.messages[0], System, "row_start"), (facts.messages[-1], Assistant, "row_end"))
        for place, (message, role, kind) in enumerate(ends):
            if not stages.is_message(message):
                yield (stages.ENDS, place), "bad_message"
            elif message["role"] != role:
                yield (stages.ENDS, place), kind


def _mismatches(facts: Facts, all_reached: list[Reached]) -> Iterator[Violation]:
    """Yield turns whose own tokens are not exactly the tokens of the whole conversation; under `relative`, not nearly."""
    if not facts.masked:
        return
    for reached in all_reached:
        idx = 0
        for number, message in enumerate(reached.conversation if reached.tokens is not None else []):
            assert reached.tokens is not None
            turn = facts.turn_tokens(message)
            if not prompts.matches(reached.tokens[idx : idx + len(turn)], turn, facts.semantics):
                stage = (CONVERSATIONS, reached.number, number, TURN_STEPS["turn_mismatch"])
                yield stage, "turn_mismatch"
                break
            idx += len(turn)
        else:
            if reached.tokens is not None and idx != len(reached.tokens):
                yield (CONVERSATIONS, reached.number, AFTER, 0), "turn_mismatch"


def exact_turn_check(facts: Facts) -> Iterator[Violation]:
    """Yield each turn whose own tokens are not exactly the tokens at its place."""
    if facts.masked:
        for reached in facts.reached:
            idx = 0
            for number, message in enumerate(reached.conversation if reached.tokens is not None else []):
                assert reached.tokens is not None
                turn = facts.turn_tokens(message)
                if reached.tokens[idx : idx + len(turn)] != turn:
                    yield (CONVERSATIONS, reached.number, number, TURN_STEPS["turn_mismatch"]), "turn_mismatch"
                idx += len(turn)


def stops_when_full(facts: Facts) -> Row:
    """Predict `stop` from `continue`: the row of the first conversations alone, up to the conversation that fills the row."""
    full = [reached.number for reached in facts.reached if reached.start == facts.settings.pack_length]
    refusal = facts.outcome.refusal
    before = refusal and stage_of(refusal, facts.messages, facts.settings) < (CONVERSATIONS, full[0]) if full else True
    if before:
        return facts.outcome
    conversations = prompts.split_conversations(facts.messages)
    messages = [message for conversation in conversations[: full[0]] for message in conversation]
    kept = SUBJECT.build_row(
        messages, facts.hf, facts.settings.replace(semantics=overridden(facts.settings.semantics, row_ends="any"))
    )
    if kept.report is None:
        return kept
    if facts.semantics.lost_conversations == "refuse":
        return Row(refusal=Refusal(kind="dropped"))
    counts: dict[str, int | None] = {
        **kept.report,
        "conversations": len(conversations),
        "dropped": len(conversations) - full[0],
    }
    if facts.prompt.format != "default":
        counts["unknown_keys"] = sum(
            any(message[key] is not None for key in message.keys() - {"role", "content"}) for message in facts.messages
        )
        if facts.prompt.format != "identity":
            counts["unrendered_messages"] = sum(
                message["role"] not in prompts.RENDERED_ROLES and bool(message.get("content"))
                for message in facts.messages
            )
    return dataclasses.replace(kept, report=counts)


def indivisible(facts: Facts) -> Iterator[Violation]:
    """Yield each segment whose length 2·cp does not divide."""
    # Losses are refused only after this check, so the boundaries are there also where the row is refused for them.
    allowed = facts.settings.replace(semantics=overridden(facts.settings.semantics, lost_conversations="allow"))
    boundaries = Facts(facts.messages, facts.hf, allowed).outcome.cu_seqlens
    if facts.settings.context_parallel_size > 1 and boundaries is not None:
        lengths = boundaries.diff()
        if bool((lengths % (2 * facts.settings.context_parallel_size) != 0).any()):
            yield (stages.DIVISIBLE,), "indivisible_segment"


def default_format(facts: Facts) -> Iterator[Violation]:
    """Yield a violation for the format `default`."""
    if facts.prompt.format == "default":
        yield (stages.UNSUPPORTED,), "unsupported_format"


def losses(facts: Facts) -> Iterator[Violation]:
    """Yield dropped conversations, then truncated conversations."""
    for kind, stage in (("dropped", stages.DROPPED), ("truncated", stages.TRUNCATED)):
        if facts.outcome.report is not None and facts.outcome.report[kind]:
            yield (stage,), kind


def missing_pad(facts: Facts) -> Iterator[Violation]:
    """Yield a violation for a pad token outside the vocabulary if no unknown token can replace it."""
    if prompts.pad_id(facts.tokenizer, facts.prompt) is None:
        yield (stages.PAD,), "no_pad_token"


def unknown_pad(facts: Facts) -> Iterator[Violation]:
    """Yield a violation for a pad token outside the vocabulary."""
    named = facts.prompt.format != "default" or facts.prompt.pad_token is not None
    lacking = (
        facts.tokenizer.token_to_id(prompts.pad_token(facts.prompt)) is None
        if named
        else facts.tokenizer.pad_id is None and facts.tokenizer.eos_id is None
    )
    if lacking:
        yield (stages.EARLY_PAD,), "no_pad_token"
