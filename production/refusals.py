"""List the reasons for which a row is refused: the kinds of docs/SPEC.md#refusals, and how to fix each."""

from __future__ import annotations

from production.errors import RowRefused

FIXES = {
    "bad_message": "write each message as an object with a role that is text",
    "bad_content": "give the message a content that is text; leave tool calls and parts of media out, or write them as text",
    "bad_text": "replace what cannot be encoded, such as a lone surrogate (\\ud800 to \\udfff)",
    "template_error": "give the conversation the shape that the tokenizer's chat template asks for, or choose another prompt format",
    "no_chat_template": "use a tokenizer with a chat template, or another prompt format",
    "unsupported_format": "choose another prompt format, or semantics with default_format=supported",
    "no_pad_token": "name a pad token that the vocabulary has (setting pad_token)",
    "row_start": "begin the row with a system message; it may be empty",
    "row_end": "end the row with an assistant message",
    "empty_row": "leave the row out, or give it a message that renders to a token",
    "empty_conversation": "leave the conversation out, or choose semantics with empty_conversation=keep",
    "empty_assistant": "leave the empty answer out when packing",
    "role_order": "put a user or tool message before each assistant message",
    "unknown_role": "use the roles system, user, assistant and tool; the formats nemotron-nano-v2 and nemotron-h-aligned render only the first three, "
    "so write what a tool says into a user message there, or nothing of it is trained on",
    "prefix_too_long": "lower assistant_prefix_len, or leave out the turn that renders to fewer tokens than the prefix",
    "turn_mismatch": "leave the conversation out, or choose a format whose turns do not merge with their neighbours",
    "too_many_boundaries": "leave empty conversations out, or pack fewer conversations into a row",
    "indivisible_segment": "make pack_length a multiple of 2·cp, or choose semantics with indivisible_segment=keep",
    "unjoined_pieces": "use a chat template that renders earlier messages the same whatever follows (one that drops earlier reasoning or counts "
    "messages does not, nor does one that closes the text behind the last message), or set data.on_unjoined_pieces to allow, which feeds what "
    "NeMo-RL feeds",
    "tools_not_rendered": "use a tokenizer with a chat template that renders tools, or take tools and tool_calls out of the line "
    "(data.train.tool_key null leaves the line's tools out)",
    "dropped": "pack fewer conversations into a row, or raise pack_length",
    "truncated": "pack fewer tokens into a row, or raise pack_length",
}
"""Fix for each kind of refusal."""


def refusal(kind: str, what: str, *, conversation: int | None = None, turn: int | None = None) -> RowRefused:
    """Return the refusal of this kind; `conversation` and `turn` count from 0 in the row and in the conversation."""
    place = "row" if conversation is None else f"conversation {conversation}"
    return RowRefused(
        kind=kind,
        what=what,
        where=place if turn is None else f"{place}, turn {turn}",
        fix=FIXES[kind],
        conversation=conversation,
        turn=turn,
    )
