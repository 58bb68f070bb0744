"""Hold what decides which conversation stands in which row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from production.errors import PackproofError
from production.semantics import DEFAULT_PRESET, parse
from tools.pack_rows.chat_lines import MiddleSystem, MissingSystem
from tools.pack_rows.layouts import Layout
from tools.pack_rows.lengths import PromptFormat
from tools.pack_rows.rows import Algorithm


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """Settings that decide which conversation stands in which row."""

    prompt_format: PromptFormat
    """Prompt format of the job that will read the rows; it decides the lengths and what is refused."""
    pack_length: int
    """Tokens a row has in the model."""
    semantics: str = DEFAULT_PRESET
    """Semantics of the job, a preset's name or `preset,field=value`; they decide what else is refused."""
    chat_key: str = "messages"
    """Key of the messages in the chat files."""
    layout: Layout = "auto"
    """Layout of the chat files; `auto` looks at the first line of each."""
    context_parallel_size: int = 1
    """Context parallel size of the job; above 1 every conversation is padded to a multiple of twice this."""
    algorithm: Algorithm = "first_fit_decreasing"
    """The packer (docs/SPEC.md#packing): fewest rows, or the input's order kept (`concatenative`)."""
    missing_system: MissingSystem = "insert"
    """A conversation without a system message in front: put an empty one there, or refuse it."""
    middle_system: MiddleSystem = "refuse"
    """A conversation with a system message in the middle: refuse it, or split it there."""
    on_bad: Literal["error", "skip"] = "error"
    """A refused conversation: write nothing, or leave it out."""
    on_long: Literal["error", "skip", "truncate", "split"] = "error"
    """A conversation longer than a row: write nothing, leave it out, let a row of its own be cut by Megatron-LM, or split it between turns."""
    pad_token: str | None = None
    """Pad token of the job; None: the prompt format's. Labels of its id do not count under `padding_mask=by_value`."""
    ignore_keys: tuple[str, ...] = ()
    """Keys that say what to train, or hold text that is not rendered, and are passed over all the same; others are refused."""
    allow_format_misfit: bool = False
    """Whether to pack for a tokenizer that lacks the prompt format's markers, which are then trained as text."""
    seed: int | None = None
    """Shuffles: the conversations before packing in order, the finished rows otherwise. None keeps the input's order."""

    def __post_init__(self) -> None:
        """Refuse what no row can have, and what no job takes."""
        if self.on_long == "truncate" and parse(self.semantics).lost_conversations == "refuse":
            raise PackproofError(
                what=f"rows that are cut are refused by the semantics {self.semantics}",
                where="on_long",
                fix="choose skip, split or error, or semantics with lost_conversations=allow",
            )
        if self.algorithm == "first_fit_shuffle" and self.seed is None:
            raise PackproofError(what="first_fit_shuffle needs a seed", where="seed", fix="give --seed")
        if self.pack_length < 1:
            raise PackproofError(
                what=f"it is {self.pack_length}, and a row needs a token", where="pack_length", fix="make it 1 or more"
            )
        if self.context_parallel_size < 1:
            raise PackproofError(
                what=f"it is {self.context_parallel_size}", where="context_parallel_size", fix="make it 1 or more"
            )
        if self.pack_length % self.granularity:
            raise PackproofError(
                what=f"{self.pack_length} is not a multiple of {self.granularity}, twice the context parallel size, so "
                "rows cannot be cut for it",
                where="pack_length",
                fix=f"use {-(-self.pack_length // self.granularity) * self.granularity}",
            )

    @property
    def granularity(self) -> int:
        """Multiple to which each conversation is padded."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def ways_for_long(self) -> str:
        """Return the choices that help a conversation which is too long under these settings."""
        ways = ["skip"] if self.on_long == "split" else ["skip", "split"]
        if parse(self.semantics).lost_conversations != "refuse":
            ways.append("truncate")
        return f"--on-long {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]}"
