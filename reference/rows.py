"""One row of a fixed length from its conversations: padding, truncation, shift, mask, positions, boundaries, report.

Lists and loops, in the order of docs/SPEC.md#row; slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference import prompts
from reference.prompts import IGNORE_INDEX, Message, Prompt, TokenizedConversation, Tokenizer, Turn
from reference.refusals import RowRefused
from reference.semantics import Semantics


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of a row."""

    prompt: Prompt
    pack_length: int
    """P: tokens a row has in the model."""
    context_parallel_size: int
    """cp; the padding granularity is 2·cp where it exceeds 1."""
    semantics: Semantics


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Place of one conversation in the row."""

    start: int
    """First position, in the row."""
    tokens: int
    """The conversation's own tokens, cut or not."""
    turns: list[Turn]


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """The five tensors of a row (docs/SPEC.md#tensors), its longest segment, its report and its segments."""

    input_ids: torch.Tensor
    """[P] int64."""
    target_ids: torch.Tensor
    """[P] int64, shifted by one."""
    token_mask: torch.Tensor
    """[P] float32."""
    position_ids: torch.Tensor
    """[P] int64."""
    cu_seqlens: torch.Tensor
    """[K] int32, ending with its first P."""
    max_seqlen: int
    report: dict[str, int | None]
    """docs/SPEC.md#report."""
    segments: list[Segment]
    """Conversations that were tokenized, in order."""
    is_padding: list[bool]
    """[P + 1]: tokens that R-LAYOUT-2, 3 or 6 put there, before the shift."""


@dataclass(kw_only=True)
class Pack:
    """A row while it grows: tokens and targets are not yet shifted."""

    tokens: list[int | None]
    targets: list[int | None]
    positions: list[int]
    is_padding: list[bool]
    cu: list[int]
    segments: list[Segment]

    def pad(self, count: int, pad: int | None) -> None:
        """Append padding; positions go on counting. R-LAYOUT-2, R-LAYOUT-6."""
        if not self.positions:
            raise RowRefused("empty_row", "the row has no token at all; remove it")
        self.tokens += [pad] * count
        self.targets += [pad] * count
        self.positions += range(self.positions[-1] + 1, self.positions[-1] + 1 + count)
        self.is_padding += [True] * count


def build_row(messages: Sequence[Message], tokenizer: Tokenizer, settings: RowSettings) -> Row:
    """Build the row of these messages, with labels shifted by one (R-SHIFT-1). Raises RowRefused, in the order of docs/SPEC.md#refusals.

    R-FORMAT-1 is its first check.
    """
    prompt, semantics, pack_length = settings.prompt, settings.semantics, settings.pack_length
    if prompt.format == "default" and semantics.default_format == "refuse":
        raise RowRefused("unsupported_format", "this path does not support the format `default`; choose another")
    prompts.check_pad_token(tokenizer, prompt, semantics)
    if not messages:
        raise RowRefused("empty_row", "the row has no message; remove it")
    prompts.check_row_ends(messages, semantics)
    pad = prompts.pad_id(tokenizer, prompt)
    if pad is None and semantics.unknown_pad_token == "unk_early":
        raise RowRefused("no_pad_token", "the vocabulary has neither the pad token nor an unknown one; set pad_token")
    conversations = prompts.split_conversations(messages)

    pack = fill(conversations, tokenizer, settings, pad)
    hidden = finish_boundaries(pack, settings, pad)
    report = count_conversations(conversations, pack, pack_length) | {"hidden_segments": hidden}
    check_losses(report, semantics)

    target_ids = torch.tensor(pack.targets[1:], dtype=torch.int64)
    ignore_boundary_labels(target_ids, pack.cu, semantics)
    token_mask = mask(target_ids, pack, pad, semantics)
    return Row(
        input_ids=torch.tensor(pack.tokens[:-1], dtype=torch.int64),
        target_ids=target_ids,
        token_mask=token_mask,
        position_ids=torch.tensor(pack.positions[:-1], dtype=torch.int64),
        cu_seqlens=torch.tensor(pack.cu, dtype=torch.int32),
        max_seqlen=max(end - start for start, end in zip(pack.cu, pack.cu[1:], strict=False)),
        report=report | count_tokens(pack, token_mask) | count_unrendered(messages, prompt),
        segments=pack.segments,
        is_padding=pack.is_padding,
    )


def fill(conversations: list[list[Message]], tokenizer: Tokenizer, settings: RowSettings, pad: int | None) -> Pack:
    """Take conversations until the row is full, then bring it to P + 1 tokens. R-LAYOUT-1 to R-LAYOUT-6."""
    semantics, pack_length = settings.semantics, settings.pack_length
    pack = Pack(tokens=[], targets=[], positions=[], is_padding=[], cu=[0], segments=[])
    for number, conversation in enumerate(conversations):
        if semantics.exact_fill == "stop" and len(pack.tokens) == pack_length:
            break
        if semantics.boundaries_beyond_pack_length == "stop" and len(pack.cu) == pack_length + 1:
            break
        try:
            tokenized = prompts.tokenize_conversation(conversation, settings.prompt, tokenizer, semantics)
        except RowRefused as refusal:
            raise refusal.at(number) from refusal
        append(pack, tokenized, settings, pad)
        if len(pack.tokens) >= pack_length + 1:
            truncate(pack, pack_length, pad)
            break
    if len(pack.tokens) < pack_length + 1:
        pack.pad(pack_length + 1 - len(pack.tokens), pad)
        pack.cu[-1] = pack_length
    return pack


def append(pack: Pack, conversation: TokenizedConversation, settings: RowSettings, pad: int | None) -> None:
    """Append one conversation with its padding and boundary. R-LAYOUT-1, R-LAYOUT-2."""
    length = len(conversation.tokens)
    pack.segments.append(Segment(start=len(pack.tokens), tokens=length, turns=conversation.turns))
    pack.tokens += conversation.tokens
    pack.targets += conversation.targets
    pack.positions += range(length)
    pack.is_padding += [False] * length
    if settings.context_parallel_size > 1:
        granularity = 2 * settings.context_parallel_size
        if len(pack.tokens) % granularity != 0:
            pack.pad(granularity - len(pack.tokens) % granularity, pad)
    pack.cu.append(len(pack.tokens))


def truncate(pack: Pack, pack_length: int, pad: int | None) -> None:
    """Cut a row that is too long to P and append one pad. R-LAYOUT-3."""
    pack.tokens = [*pack.tokens[:pack_length], pad]
    pack.targets = [*pack.targets[:pack_length], pad]
    pack.positions = pack.positions[: pack_length + 1]
    pack.is_padding = [*pack.is_padding[:pack_length], True]
    pack.cu[-1] = pack_length


def finish_boundaries(pack: Pack, settings: RowSettings, pad: int | None) -> int:
    """Check pad id and boundaries, then cut `cu` after its first P; returns how many that hides. R-LAYOUT-7, R-CU-1."""
    semantics, pack_length, context_parallel_size = (
        settings.semantics,
        settings.pack_length,
        settings.context_parallel_size,
    )
    if pad is None:
        raise RowRefused("no_pad_token", "the vocabulary has neither the pad token nor an unknown one; set pad_token")
    if semantics.boundaries_beyond_pack_length == "refuse" and len(pack.cu) > pack_length + 1:
        raise RowRefused(
            "too_many_boundaries",
            f"a row of {pack_length} tokens holds at most {pack_length + 1} boundaries, got {len(pack.cu)}; raise pack_length",
        )
    if semantics.indivisible_segment == "refuse" and context_parallel_size > 1:
        for number, (start, end) in enumerate(zip(pack.cu, pack.cu[1:], strict=False)):
            if (end - start) % (2 * context_parallel_size) != 0:
                why = f"a segment of {end - start} tokens, which {2 * context_parallel_size} does not divide; fix pack_length"
                raise RowRefused("indivisible_segment", why, conversation=number)
    visible = pack.cu.index(pack_length) + 1
    hidden = len(pack.cu) - visible
    pack.cu = pack.cu[:visible]
    return hidden


def ignore_boundary_labels(target_ids: torch.Tensor, cu: list[int], semantics: Semantics) -> None:
    """Set in place the label at each inner boundary to -100, where that is asked. R-BOUNDARY-1."""
    if semantics.boundary_label == "ignore":
        for boundary in cu:
            if 0 < boundary < len(target_ids):
                target_ids[boundary - 1] = IGNORE_INDEX


def mask(target_ids: torch.Tensor, pack: Pack, pad: int | None, semantics: Semantics) -> torch.Tensor:
    """Return the mask [P] float32, 1 where the label counts. R-MASK-1."""
    token_mask = torch.ones(len(target_ids), dtype=torch.float32)
    for position, target in enumerate(target_ids.tolist()):
        by_value = target == pad
        by_position = pack.is_padding[position + 1]
        padding = by_value if semantics.padding_mask == "by_value" else by_position
        if padding or target == IGNORE_INDEX:
            token_mask[position] = 0.0
    return token_mask


def count_conversations(conversations: list[list[Message]], pack: Pack, pack_length: int) -> dict[str, int | None]:
    """Count kept, truncated and dropped conversations. R-REPORT-1."""
    kept = truncated = lost_tokens = 0
    for segment in pack.segments:
        inside = min(segment.tokens, max(0, pack_length - segment.start))
        lost_tokens += segment.tokens - inside
        if inside == segment.tokens:
            kept += 1
        elif inside > 0:
            truncated += 1
    return {
        "conversations": len(conversations),
        "kept": kept,
        "truncated": truncated,
        "dropped": len(conversations) - kept - truncated,
        "empty_conversations": sum(segment.tokens == 0 for segment in pack.segments),
        "truncated_tokens": lost_tokens,
    }


def count_tokens(pack: Pack, token_mask: torch.Tensor) -> dict[str, int | None]:
    """Count padding, trained tokens and boundary labels. R-REPORT-2."""
    inner = {boundary for boundary in pack.cu if 0 < boundary < len(token_mask)}
    return {
        "padding_tokens": sum(pack.is_padding[:-1]),
        "trained_tokens": int(token_mask.sum()),
        "boundary_labels": sum(int(token_mask[boundary - 1]) for boundary in inner),
    }


def count_unrendered(messages: Sequence[Message], prompt: Prompt) -> dict[str, int | None]:
    """Count messages and keys that a format does not render. R-REPORT-3."""
    if prompt.format == "default":
        return {"unrendered_messages": None, "unknown_keys": None}
    nemotron = prompt.format != "identity"
    unrendered = [m for m in messages if nemotron and m["role"] not in prompts.RENDERED_ROLES and m.get("content")]
    unknown = [m for m in messages if any(m[key] is not None for key in m.keys() - {"role", "content"})]
    return {"unrendered_messages": len(unrendered), "unknown_keys": len(unknown)}


def check_losses(report: dict[str, int | None], semantics: Semantics) -> None:
    """Refuse a row that loses conversations, where that is asked. R-LAYOUT-7."""
    if semantics.lost_conversations == "refuse":
        for kind in ("dropped", "truncated"):
            if report[kind]:
                raise RowRefused(kind, f"{report[kind]} conversations are {kind}; pack them into another row")
