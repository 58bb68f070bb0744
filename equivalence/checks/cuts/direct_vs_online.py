"""Compare the direct and the online path, on both sides, by one row's messages through both (R-MEET).

The online microbatch is predicted whole from the direct one by the closed list of R-MEET-2 and 3, so a difference that is not on
the list shows, and so does an entry that no longer holds; `fired` counts the positions at which each entry showed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from equivalence.cases.result import CheckResult
from equivalence.checks.cuts.pairs import compare_sides
from equivalence.generators import tokenizers
from equivalence.generators.online import MeetingCase
from equivalence.subjects.reference import TransformersTokenizer, adapt
from production.online import bins, chat, padded_batch
from production.parallel import microbatches as production
from production.parallel.context_parallel import shard_tensors
from production.rows import batch as batches
from production.rows.builder import RowBuilder, RowSettings
from production.semantics import parse
from reference import batches as reference_batches
from reference import chat as reference_chat
from reference import context_parallel, prompts
from reference import microbatches as reference
from reference import rows as reference_rows
from reference.semantics import semantics

CLOSED_LIST = ("loss_outside", "position_ids", "padding_id", "uncounted_label")
"""R-MEET-2, by name."""
BY_PRESET = ("padding_mask", "boundary_label")
"""R-MEET-3, by the field of Semantics."""

Share = dict[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Side:
    """Holds one side's results for the row, for every rank: of both paths, and whole."""

    direct: list[Share]
    online: list[Share]
    lengths: list[int]
    """True tokens of each conversation."""
    padded: list[int]
    """Boundaries, from 0 to P."""
    direct_row: dict[str, torch.Tensor]
    """The direct path's row before it is cut."""
    cut: Callable[[torch.Tensor, int], torch.Tensor]
    """A rank's share of a tensor [P]."""


def check_meeting(case: MeetingCase) -> CheckResult:
    """Run both paths on both sides, and compare each side's online shares with the prediction from its direct shares."""
    sides = {"reference": _reference(case), "production": _production(case)}
    named = {}
    fired: dict[str, int] = {}
    for name, side in sides.items():
        predicted, fires = _predict(side, case)
        fired = {entry: fired.get(entry, 0) + count for entry, count in fires.items()}
        named[f"{name}: online"] = {
            key: tensor for rank, share in enumerate(side.online) for key, tensor in _told(share, rank).items()
        }
        named[f"{name}: predicted"] = {
            key: tensor for rank, share in enumerate(predicted) for key, tensor in _told(share, rank).items()
        }
    result = compare_sides("direct_vs_online", named)
    return CheckResult(check="direct_vs_online", findings=result.findings, fired=fired)


def conversations(case: MeetingCase) -> list[list[dict[str, str]]]:
    """Split the row's messages into conversations."""
    starts = [place for place, message in enumerate(case.messages) if message["role"] == "system"]
    return [case.messages[start:end] for start, end in zip(starts, [*starts[1:], len(case.messages)], strict=True)]


def _predict(side: Side, case: MeetingCase) -> tuple[list[Share], dict[str, int]]:
    """Predict the online shares by R-MEET, and at how many positions each entry of the list shows."""
    ids, labels, mask = (side.direct_row[name] for name in ("input_ids", "target_ids", "target_mask"))
    own = torch.zeros_like(ids, dtype=torch.bool)
    has_target = own.clone()  # the next token is of the same conversation
    followers, before = torch.arange(len(ids)) + 1, torch.arange(len(ids)) - 1
    for (start, end), length in zip(itertools.pairwise(side.padded), side.lengths, strict=True):
        own[start : start + length] = True
        has_target[start : start + length - 1] = True
        followers[end - 1], before[start] = start, end - 1
    values = parse(case.preset)
    # R-MEET-3. A target that is the pad id and not -100 lies in an answer, where it counts online.
    added = (mask == 1) & ~has_target & (values.boundary_label == "next")
    dropped = (mask == 0) & has_target & (labels == _pad_id(case)) & (values.padding_mask == "by_value")
    # R-MEET-2.
    predicted_ids = torch.where(own, ids, 0)
    predicted_mask = torch.where(added, 0.0, torch.where(dropped, 1.0, mask))
    predicted_labels = torch.where(predicted_mask == 1, labels, predicted_ids[followers])
    token_mask = predicted_mask[before]
    for start, conversation in zip(side.padded, conversations(case), strict=False):
        token_mask[start] = float(_begins_with_answer(conversation, case))
    shares: list[Share] = [
        {
            **share,
            "input_ids": side.cut(predicted_ids, rank),
            "target_ids": side.cut(predicted_labels, rank),
            "target_mask": side.cut(predicted_mask, rank),
            "labels": None,
            "loss_mask": side.cut(token_mask, rank) if case.depths else None,  # the tokens' mask: R-ONLINE-7
            "position_ids": None,  # R-ONLINE-7
        }
        for rank, share in enumerate(side.direct)
    ]
    return shares, {
        "loss_outside": int(mask.sum()),
        "position_ids": len(ids),
        "padding_id": int((ids != predicted_ids).sum()),
        "uncounted_label": int((labels != predicted_labels).sum()),
        "padding_mask": int(dropped.sum()),
        "boundary_label": int(added.sum()),
    }


def _begins_with_answer(conversation: list[dict[str, str]], case: MeetingCase) -> bool:
    """Return whether its first token is an assistant's, all before rendering to nothing."""
    first = next(message for message in conversation if message["content"])
    return case.prompt_format == "identity" and first["role"] == "assistant"


def _production(case: MeetingCase) -> Side:
    tokenized = _chat_tokenizer(case.prompt_format).tokenize(conversations(case))
    lengths = [len(each.token_ids) for each in tokenized]
    unit, pack_length = _unit(case), _pack_length(case, lengths)
    built = RowBuilder(
        tokenizer=tokenizers.load("word"),
        settings=RowSettings(
            pack_length=pack_length,
            prompt_format=case.prompt_format,
            context_parallel_size=case.size,
            semantics=parse(case.preset),
        ),
    ).build(case.messages)
    batch = batches.collate([built])
    padding = bins.Padding(sequence_multiple=unit, row_length=pack_length)
    online = padded_batch.build_padded_batch(tokenized, make_sequence_length_divisible_by=unit)

    def settings(rank: int) -> production.MicrobatchSettings:
        return production.MicrobatchSettings(
            context_parallel_rank=rank, context_parallel_size=case.size, padding=padding, depths=case.depths
        )

    def share(made: production.Microbatch) -> Share:
        found = {name: None if (tensor := getattr(made, name)) is None else tensor[0] for name in _NAMES}
        params = made.packed_seq_params
        return found | {
            "cu_seqlens": params.cu_seqlens_q,
            "max_seqlen": torch.tensor(params.max_seqlen_q),
            "total_tokens": torch.tensor(made.total_tokens),
            "seq_idx": params.seq_idx,
        }

    boundaries = built.cu_seqlens.clone()
    return Side(
        direct=[share(production.process_microbatch(batch, settings(rank))) for rank in range(case.size)],
        online=[share(production.process_microbatch(online, settings(rank))) for rank in range(case.size)],
        lengths=lengths,
        padded=boundaries.tolist(),
        direct_row=_whole(built.input_ids, built.target_ids, built.token_mask),
        cut=lambda tensor, rank: shard_tensors({"": tensor}, boundaries, rank, case.size)[""],
    )


def _reference(case: MeetingCase) -> Side:
    tokenizer: TransformersTokenizer = adapt(tokenizers.load("word"))
    prompt = prompts.Prompt(format=case.prompt_format)
    tokenized = [
        reference_chat.joined(reference_chat.tokenize_messages(each, prompt, tokenizer, reference_chat.ChatSettings()))
        for each in conversations(case)
    ]
    lengths = [len(tokens) for tokens, _ in tokenized]
    pack_length = _pack_length(case, lengths)
    row = reference_rows.build_row(
        case.messages,
        tokenizer,
        reference_rows.RowSettings(
            prompt=prompt,
            pack_length=pack_length,
            context_parallel_size=case.size,
            semantics=semantics(case.preset),
        ),
    )
    batch = reference_batches.collate([row])
    how = reference.Padding(sequence_multiple=_unit(case), row_multiple=1, row_length=pack_length)
    online = reference.padded_batch(tokenized, _unit(case))

    def share(batch: reference_batches.Batch | reference.PaddedBatch, rank: int) -> Share:
        made = reference.process_microbatch(
            batch, rank=rank, context_parallel_size=case.size, how=how, depths=case.depths
        )
        found: Share = {name: getattr(made, name) for name in _NAMES}
        return found | {
            "cu_seqlens": torch.tensor(made.cu_seqlens, dtype=torch.int32),
            "max_seqlen": torch.tensor(made.max_seqlen),
            "total_tokens": torch.tensor(made.total_tokens),
        }

    boundaries = row.cu_seqlens.tolist()
    return Side(
        direct=[share(batch, rank) for rank in range(case.size)],
        online=[share(online, rank) for rank in range(case.size)],
        lengths=lengths,
        padded=boundaries,
        direct_row=_whole(row.input_ids, row.target_ids, row.token_mask),
        cut=lambda tensor, rank: context_parallel.shard(tensor, boundaries, rank, case.size),
    )


@functools.cache
def _chat_tokenizer(prompt_format: str) -> chat.ChatTokenizer:
    settings = chat.ChatSettings(prompt_format=prompt_format, add_bos=False, add_eos=False)
    return chat.ChatTokenizer(tokenizer=tokenizers.load("word"), settings=settings)


_NAMES = ("input_ids", "position_ids", "labels", "loss_mask", "target_ids", "target_mask")


def _whole(ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "target_ids": labels, "target_mask": mask}


def _unit(case: MeetingCase) -> int:
    return 2 * case.size if case.size > 1 else 1


def _pack_length(case: MeetingCase, lengths: list[int]) -> int:
    unit = _unit(case)
    return sum(padded_batch.round_up(length, unit) for length in lengths) + unit * case.spare


def _pad_id(case: MeetingCase) -> int:
    return int(tokenizers.load("word").convert_tokens_to_ids(prompts.PAD_TOKENS[case.prompt_format]))


def _told(share: Share, rank: int) -> dict[str, torch.Tensor]:
    return {f"{name} of rank {rank}": torch.empty(0) if value is None else value for name, value in share.items()}
