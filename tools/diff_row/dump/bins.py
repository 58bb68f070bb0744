"""The online path's bins as the reference packs them, for what a rank of a job fed (docs/SPEC.md#online-path).

One packing holds for the whole global batch, so all its conversations are made before the first bin is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from equivalence.subjects import Refusal, Row
from equivalence.subjects.reference import adapt
from reference import chat, context_parallel, packing, prompts
from reference import microbatches as reference
from reference.refusals import RowRefused
from tools.diff_row.dump.step_reader import Dumped
from tools.diff_row.errors import problem
from tools.diff_row.rank.steps import TENSORS, Has
from tools.diff_row.row.findings import Findings, Side, Source, compare
from tools.diff_row.row.layout import Ints, map_conversations
from tools.diff_row.tokens import TokenTexts

_SQUEEZED = ("input_ids", "target_ids", "target_mask", "position_ids", "cu_seqlens_padded", "max_seqlen")


@dataclass(frozen=True, kw_only=True, eq=False)
class Bin:
    """A bin on both sides."""

    findings: Findings
    """Of its row, the conversations end to end."""
    ways: Mapping[str, Mapping[str, Has]]
    """Tensors of the row by side."""
    members: tuple[int, ...]
    """Its conversations as the reference packs them, by their place in the global batch."""


class ReferenceBins:
    """All bins of one dumped step."""

    def __init__(
        self,
        dumped: Dumped,
        lines: Sequence[Mapping[str, Any]],
        *,
        tokenizer: Any,
        tokenizer_name: str,
        layout: str,
    ) -> None:
        """`lines` are the objects of `dumped.rows`. Raises BadInput if the reference refuses a conversation of the dump."""
        settings, chat_settings = dumped.said.made_with.bins, dumped.said.made_with.chat
        assert settings is not None  # of the online path
        assert chat_settings is not None
        self._settings, self._rows = settings, dumped.said.rows
        self._tokenizer, self._tokenizer_name, self._layout = tokenizer, tokenizer_name, layout
        self._messages = [line[dumped.said.made_with.chat_key] for line in lines]
        tool_key = chat_settings.tool_key
        self._tools = [None if tool_key is None else line.get(tool_key) for line in lines]
        self._prompt = prompts.Prompt(format=chat_settings.prompt_format)
        self._chat = chat.ChatSettings(
            bos_token=tokenizer.bos_token if chat_settings.add_bos else None,
            eos_token=tokenizer.eos_token if chat_settings.add_eos else None,
            add_generation_prompt=chat_settings.add_generation_prompt,
            on_unjoined_pieces=chat_settings.on_unjoined_pieces,
        )
        self._lengths: list[list[int]] = []
        made = [self._weighted(number, chat_settings.max_length) for number in range(len(lines))]
        multiple = settings.make_sequence_length_divisible_by
        try:
            self._padded_batch = reference.padded_batch(
                [(tokens, mask) for tokens, mask, _ in made], multiple, settings.pad_token_id
            )
            self._padded_batch.sample_mask.copy_(torch.tensor([weight for _, _, weight in made]))
            lengths = [reference.round_up(len(tokens), multiple) for tokens, _, _ in made]
            self._bins = packing.raise_bin_count(self._pack(lengths), self._settings.data_parallel_size)
            self._paddings = [self._padding(lengths, rank) for rank in range(settings.data_parallel_size)]
        except (reference.PaddingError, packing.PackingError) as error:
            raise problem(
                f"the reference does not pack it: {error}",
                where="made_with.bins",
                fix="give the file that the job read",
            ) from error

    def count(self, data_rank: int) -> int:
        """Return the number of bins of a data-parallel rank."""
        return len(packing.bins_of_rank(self._bins, data_rank, self._settings.data_parallel_size))

    def compare(self, dumped: Dumped, number: int, *, name: str) -> Bin:
        """Compare bin `number` of this rank with the rank's dump, whose side is called `name`."""
        own = packing.bins_of_rank(self._bins, dumped.place.data_rank, self._settings.data_parallel_size)
        theirs = self._fed(dumped, number, name)
        members = tuple(own[number]) if number < len(own) else ()
        row, way = self._made(dumped, members) if members else (_none(f"the reference packs {len(own)} bins"), {})
        sides = (Side(name="reference", version="", row=row), theirs)
        compared = compare(sides)
        rows = [self._rows[member] for member in members]
        found = Findings(
            source=Source(
                file=", ".join(dict.fromkeys(each.file for each in rows)),
                bin=tuple((each.file, each.line) for each in rows),
            ),
            settings=None,
            tokenizer=self._tokenizer_name,
            texts=TokenTexts(self._tokenizer),
            sides=sides,
            map=map_conversations([self._turns(member) for member in members], row),
            pairs=compared.pairs,
            listed=compared.listed,
            differing=compared.differing,
            flaws={},
        )
        gone: Mapping[str, Has] = (
            {} if theirs.row.refusal is not None else {"batch": _batch(dumped, number), **dumped.way(number)}
        )
        return Bin(findings=found, ways={"reference": way, name: gone}, members=members)

    def _pack(self, lengths: Sequence[int]) -> packing.Bins:
        if self._settings.algorithm == "first_fit_shuffle":
            return packing.first_fit_shuffle(lengths, self._settings.capacity, self._settings.seed or 0)
        return packing.PACKERS[self._settings.algorithm](lengths, self._settings.capacity)

    def _padding(self, lengths: Sequence[int], data_rank: int) -> reference.Padding:
        """Return a data-parallel rank's padding, which its own longest bin decides (R-ONLINE-5). Raises PaddingError."""
        settings = self._settings
        own = packing.bins_of_rank(self._bins, data_rank, settings.data_parallel_size)
        return reference.padding(
            multiple=settings.make_sequence_length_divisible_by,
            sequence_parallel=settings.tensor_parallel_size > 1,
            longest_bin=max(sum(lengths[member] for member in members) for members in own),
            context_parallel_size=settings.context_parallel_size,
            tensor_parallel_size=settings.tensor_parallel_size,
            pipeline_parallel_size=settings.pipeline_parallel_size,
            precision=settings.precision,
            hybrid_expert_parallel=settings.hybrid_expert_parallel,
        )

    def _pieces(self, number: int) -> list[chat.MessageTokens]:
        """Return the tokens of each message of a conversation. Raises BadInput."""
        try:
            return chat.tokenize_messages(
                self._messages[number], self._prompt, adapt(self._tokenizer), self._chat, self._tools[number]
            )
        except RowRefused as refused:
            where = self._rows[number]
            raise problem(
                f"the reference refuses what was fed ({refused.kind}): {refused.why}",
                where=f"{where.file}, line {where.line}",
                fix="give the tokenizer and the file that the job read",
            ) from refused

    def _weighted(self, number: int, max_length: int) -> tuple[list[int], list[int], float]:
        """Return tokens, mask and weight of a conversation; keep the end of each message for its turns. Raises BadInput."""
        pieces = self._pieces(number)
        tokens, mask, weight = chat.weighted(pieces, max_length)
        kept = [len(piece.tokens) for piece in pieces]
        if not weight:
            kept = [min(length, chat.STUB_TOKENS, max_length // len(pieces)) for length in kept]
        self._lengths.append(kept)
        return tokens, mask, weight

    def _turns(self, number: int) -> tuple[tuple[str, ...], Ints]:
        """Return the roles of a conversation, and the message of each of its tokens."""
        lengths = self._lengths[number]
        turns: Ints = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return tuple(str(message["role"]) for message in self._messages[number]), turns

    def _made(self, dumped: Dumped, members: Sequence[int]) -> tuple[Row, dict[str, Has]]:
        """Return the reference's row of these conversations, and this rank's tensors."""
        batch = reference.take(self._padded_batch, members)
        place, depths = dumped.place, dumped.said.depths
        how = self._paddings[place.data_rank]
        whole = reference.process_microbatch(batch, rank=0, context_parallel_size=1, how=how, depths=depths)
        made = reference.process_microbatch(
            batch,
            rank=place.context_rank,
            context_parallel_size=place.cp,
            how=how,
            depths=depths,
            layout=self._layout,
        )
        assert whole.row is not None
        row = Row(
            input_ids=whole.row.input_ids,
            target_ids=whole.row.target_ids,
            token_mask=whole.row.target_mask,
            position_ids=whole.row.position_ids,
            cu_seqlens=torch.tensor(whole.row.cu_seqlens_padded, dtype=torch.int32),
            max_seqlen=whole.max_seqlen,
        )
        owned = context_parallel.owned_positions(whole.cu_seqlens, place.context_rank, place.cp, self._layout)
        share = {
            "positions": torch.tensor(owned),
            "input_ids": made.input_ids,
            "target_ids": made.target_ids,
            "token_mask": made.target_mask,
            "cu_seqlens": torch.tensor(made.cu_seqlens, dtype=torch.int32),
        }
        padded_batch = {name: getattr(batch, name) for name in ("input_ids", "token_mask", "sample_mask")}
        way: dict[str, Has] = {
            "batch": padded_batch
            | {
                "input_lengths": torch.tensor(batch.input_lengths),
                "own_mask": whole.row.token_mask,
                "cu_seqlens": torch.tensor(whole.row.cu_seqlens, dtype=torch.int32),
            },
            "share": share,
        }
        for depth, each in enumerate(made.depths, 1):
            way[f"share, depth {depth}"] = {
                tensor: found for tensor in TENSORS if (found := getattr(each, tensor)) is not None
            }
        return row, way

    def _fed(self, dumped: Dumped, number: int, name: str) -> Side:
        told = f"microbatch {number} of the dump"
        if number >= dumped.microbatches:
            return Side(name=name, version=told, row=_none(f"the rank fed {dumped.microbatches} microbatches"))
        found = dumped.of(number, "squeezed", _SQUEEZED)
        row = Row(
            input_ids=found["input_ids"].reshape(-1),
            target_ids=found["target_ids"].reshape(-1),
            token_mask=found["target_mask"].reshape(-1),
            position_ids=found["position_ids"].reshape(-1),
            cu_seqlens=found["cu_seqlens_padded"],
            max_seqlen=int(found["max_seqlen"]),
        )
        return Side(name=name, version=told, row=row)


def _batch(dumped: Dumped, number: int) -> dict[str, torch.Tensor]:
    """Return the dumped padded batch, and the tensors of its row that are not compared as a row: the tokens' own mask, sums of true lengths."""
    squeezed = dumped.of(number, "squeezed", ("token_mask", "cu_seqlens"))
    return dumped.of(number, "row", ("input_ids", "token_mask", "sample_mask", "input_lengths")) | {
        "own_mask": squeezed["token_mask"].reshape(-1),
        "cu_seqlens": squeezed["cu_seqlens"],
    }


def _none(why: str) -> Row:
    """Return the row of a bin that a side does not have."""
    return Row(refusal=Refusal(kind="no_bin", message=why))
