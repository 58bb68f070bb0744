"""The reference as a subject: adapts a transformers tokenizer to its small protocol, and its row to the common one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from equivalence.subjects.protocol import Batch, Messages, Row, RowSettings, as_batch, as_refusal, as_row
from equivalence.subjects.tokenizers import as_transformers
from reference import batches, prompts, rows
from reference.refusals import RowRefused
from reference.semantics import semantics


class TransformersTokenizer:
    """A transformers tokenizer behind the reference's protocol."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.get_vocab()
        # What the tokenizer makes of a token that it lacks: some written in Python make nothing of it, unk token or not.
        self.unk_id = tokenizer.unk_token_id and tokenizer.convert_tokens_to_ids("<no such token>")
        self.pad_id = tokenizer.pad_token_id
        self.eos_id = tokenizer.eos_token_id
        # A divergence builds a row a dozen times from the same texts; a call costs 80 µs whatever its length.
        self._ids = functools.lru_cache(maxsize=4096)(self._call)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without added special tokens, by the plain call that Megatron-LM also uses."""
        return list(self._ids(text))

    def _call(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except UnicodeEncodeError as error:  # of tokenizers written in Python, where the library raises TypeError
            raise TypeError(str(error)) from error

    def render(
        self, conversation: prompts.Conversation, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> str:
        """Render by the tokenizer's own template."""
        template = self._tokenizer.chat_template
        if template is None:
            raise LookupError
        if not isinstance(template, str):  # Megatron-LM hands the set of named templates over as if it were one
            raise TypeError("a chat template must be one text, got a set of named templates; keep one of them")
        # The last option is none of transformers': a variable that the template sees, as in Megatron-LM.
        return str(
            self._tokenizer.apply_chat_template(
                conversation,
                chat_template=template,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                return_assistant_token_mask=False,
            )
        )

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary lacks the token."""
        found = self._vocabulary.get(token)
        return None if found is None else int(found)


class Reference:
    """`reference/` as a subject."""

    name = "reference"
    is_witness = True
    """An exception of it ends the run instead of being a difference."""

    def build_row(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> Row:
        """Return the row, or its refusal."""
        try:
            built = self.build(messages, tokenizer, settings)
        except RowRefused as refused:
            return as_refusal(refused)
        return as_row(built)

    def build(self, messages: Messages, tokenizer: Any, settings: RowSettings) -> rows.Row:
        """Return the reference's own row, which also maps positions to conversations and turns. Raises RowRefused."""
        return rows.build_row(messages, adapt(as_transformers(tokenizer)), row_settings(settings))

    def collate(self, built: Sequence[Row], settings: RowSettings) -> Batch:
        """Return the batch of these rows."""
        del settings
        batch = batches.collate(built)  # type: ignore[arg-type]  # the same five fields
        flat, longest = batches.flatten_boundaries(batch)
        return as_batch(batch, flat_cu_seqlens=flat, flat_max_seqlen=longest)


@functools.lru_cache(maxsize=32)
def adapt(tokenizer: Any) -> TransformersTokenizer:
    """Return the adapter of a tokenizer, whose vocabulary is read once."""
    return TransformersTokenizer(tokenizer)


@functools.lru_cache(maxsize=1024)
def row_settings(settings: RowSettings) -> rows.RowSettings:
    """Return the reference's own settings. Raises ValueError for unknown semantics."""
    chosen = semantics(settings.semantics)
    return rows.RowSettings(
        prompt=prompts.Prompt(
            format=settings.prompt_format,
            pad_token=settings.pad_token,
            assistant_prefix_len=settings.assistant_prefix_len,
            null_content=chosen.null_content,
        ),
        pack_length=settings.pack_length,
        context_parallel_size=settings.context_parallel_size,
        semantics=chosen,
    )


SUBJECT = Reference()
