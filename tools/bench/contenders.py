"""Measure one task of `packproof-bench rows`: one prompt format, one number of threads, all contenders in turns.

This module is not a command: `rows` starts it with a task in JSON, in an environment that fixes the number of threads.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from production.library_warnings import quiet_libraries
from production.rows.builder import Row, RowBuilder, RowSettings
from production.tokens.folder import load_folder
from production.tokens.prompts import FORMATS, render_messages, render_template, split_conversations
from tools.bench.rows import Result

Messages = list[dict[str, Any]]

QUICK_REPEATS = 3
"""Rounds of all others for one of Megatron-LM, which takes far longer than they do."""
TOKENS_PER_MEASUREMENT = 32_768
"""At least; short rows are measured some at a time."""
SHORT_CHARACTERS = 64
"""Largest mean number of characters of a short turn; the chats of the sample have 30."""
LONG_CHARACTERS = 1500
"""Smallest number of characters of a long turn; all questions and all answers of a conversation are joined into one turn each."""


def measure(task: dict[str, Any]) -> list[Result]:
    """Return the results of one task, for each kind of turns and each pack length."""
    torch.set_num_threads(task["threads"])
    tokenizer = load_folder(Path(task["tokenizer"]))
    return [_Bench(task, tokenizer, kind, length).run() for kind in task["kinds"] for length in task["pack_lengths"]]


class _Bench:
    def __init__(self, task: dict[str, Any], tokenizer: Any, kind: str, pack_length: int) -> None:
        self._task, self._kind, self._length = task, kind, pack_length
        self._format = FORMATS[task["prompt_format"]]
        self._tokenizer = tokenizer
        settings = RowSettings(pack_length=pack_length, prompt_format=self._format.name)
        self._builder = RowBuilder(tokenizer=tokenizer, settings=settings)
        self._builder_of_all = RowBuilder(tokenizer=tokenizer, settings=settings, reuse_equal_turns=False)
        self._rows = _make_rows(tokenizer, _conversations(task["files"], kind), pack_length)
        self._dataset = megatron_lm_dataset(task["tokenizer"], self._format.name, pack_length, self._rows)

    def run(self) -> Result:
        texts = [self._texts(messages) for messages in self._rows]
        unique = [list(dict.fromkeys(row)) for row in texts]
        encode = self._tokenizer.backend_tokenizer.encode_batch_fast
        tokens = self._check()
        quick: dict[str, Callable[[], object]] = {
            "bare_unique": lambda: [len(encode(row, add_special_tokens=False)) for row in unique],
            "production": lambda: self._build(self._builder),
            "bare_all": lambda: [len(encode(row, add_special_tokens=False)) for row in texts],
            "production_all": lambda: self._build(self._builder_of_all),
        }
        seconds: dict[str, list[float]] = {name: [] for name in (*quick, "megatron_lm")}
        for _ in range(self._task["repeats"]):
            for _ in range(QUICK_REPEATS):
                for name, act in quick.items():
                    seconds[name].append(_seconds(act))
            whole = _seconds(lambda: [self._dataset[index] for index in range(len(self._rows))])
            seconds["megatron_lm"] += [whole] * QUICK_REPEATS
        speed = {name: tokens / statistics.median(times) / 1e6 for name, times in seconds.items()}
        return Result(
            kind=self._kind,
            prompt_format=self._format.name,
            pack_length=self._length,
            threads=self._task["threads"],
            rows=len(self._rows),
            tokens=tokens,
            megatron_lm=speed["megatron_lm"],
            production=speed["production"],
            bare=speed["bare_unique"],
            over_megatron_lm=_ratio(seconds["megatron_lm"], seconds["production"]),
            over_bare_unique=_ratio(seconds["bare_unique"], seconds["production"]),
            over_bare_all=_ratio(seconds["bare_all"], seconds["production_all"]),
        )

    def _build(self, builder: RowBuilder) -> int:
        """Build all rows: in this thread if `threads` is 1, else concurrently."""
        workers = 0 if self._task["threads"] == 1 else self._task["threads"]
        return sum(isinstance(row, Row) for row in builder.build_many(self._rows, workers=workers))

    def _texts(self, messages: Messages) -> list[str]:
        """Return the texts of a row's turns; in the format `default` the texts of its conversations, because the template renders no single turn."""
        row = split_conversations(messages)
        numbers = range(row.count)
        if self._format.render is None:
            return [render_template(row.conversation(number), self._tokenizer, number) for number in numbers]
        turns = (render_messages(row.conversation(number), self._format, number) for number in numbers)
        return list(itertools.chain.from_iterable(turns))

    def _check(self) -> int:
        """Check that both sides build the same rows; return the number of tokens in all rows."""
        tokens = 0
        for index, messages in enumerate(self._rows):
            row, sample = self._builder.build(messages), self._dataset[index]
            same = (
                torch.equal(row.input_ids, sample["tokens"])
                and torch.equal(row.target_ids, sample["labels"])
                and torch.equal(row.token_mask, sample["loss_mask"])
                and torch.equal(row.position_ids, sample["position_ids"])
            )
            if not same:
                raise SystemExit(f"row {index} differs between production and Megatron-LM: no speed is worth comparing")
            tokens += self._length - int(row.report["padding_tokens"] or 0)
        return tokens


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _ratio(others: list[float], ours: list[float]) -> float:
    return statistics.median(other / own for other, own in zip(others, ours, strict=True))


def _make_rows(tokenizer: Any, conversations: list[Messages], pack_length: int) -> list[Messages]:
    """Make rows from the conversations in turn, so long that nano-v2 fills each row and cuts its last conversation."""
    builder = RowBuilder(tokenizer=tokenizer, settings=RowSettings(pack_length=1 << 20))
    numbered = _numbered(conversations)
    made: list[Messages] = []
    while len(made) * pack_length < TOKENS_PER_MEASUREMENT:
        row: Messages = []
        tokens = 0
        while tokens < pack_length:
            conversation = next(numbered)
            tokens += (1 << 20) - int(builder.build(conversation).report["padding_tokens"] or 0)
            row += conversation
        made.append(row)
    return made


def _numbered(conversations: list[Messages]) -> Iterator[Messages]:
    """Yield the conversations again and again; from the second time on each text has a number, so that no text repeats."""
    for repeat in itertools.count():
        for conversation in conversations:
            yield [
                turn if repeat == 0 or turn["role"] == "system" else turn | {"content": f"{repeat}. {turn['content']}"}
                for turn in conversation
            ]


def _conversations(files: list[str], kind: str) -> list[Messages]:
    """Return the conversations of this kind that all formats accept, in the files' order."""
    found: list[Messages] = []
    for file in files:
        for line in Path(file).read_bytes().split(b"\n"):
            if line:
                row = split_conversations(msgspec.json.decode(line)["messages"])
                found += [[dict(turn) for turn in row.conversation(number)] for number in range(row.count)]
    chosen = filter(_is_short, found) if kind == "short" else filter(_is_long, map(_put_together, found))
    kept = [conversation for conversation in chosen if _is_plain(conversation)]
    if not kept:
        raise SystemExit(f"{', '.join(files)}: no conversation of {kind} turns")
    return kept


def _is_plain(conversation: Messages) -> bool:
    """Return whether all formats accept the conversation: system, then questions and answers in turn, all of them with text."""
    roles = [turn["role"] for turn in conversation]
    pairs = len(conversation) // 2
    return roles == ["system", *["user", "assistant"] * pairs] and all(
        turn["content"].strip() for turn in conversation[1:]
    )


def _is_short(conversation: Messages) -> bool:
    return sum(len(turn["content"]) for turn in conversation) <= SHORT_CHARACTERS * len(conversation)


def _is_long(conversation: Messages) -> bool:
    return all(len(turn["content"]) >= LONG_CHARACTERS for turn in conversation if turn["role"] == "assistant")


def _put_together(conversation: Messages) -> Messages:
    """Join all questions of a conversation into one, and all answers into one."""
    text = {
        role: "\n\n".join(turn["content"] for turn in conversation if turn["role"] == role)
        for role in ("system", "user", "assistant")
    }
    return [{"role": role, "content": content} for role, content in text.items()]


def megatron_lm_dataset(folder: str, prompt_format: str, pack_length: int, rows: list[Messages]) -> Any:
    """Return the installed SFTDataset over these rows."""
    with quiet_libraries():
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig  # noqa: PLC0415
        from megatron.core.datasets.utils import Split  # noqa: PLC0415
        from megatron.core.tokenizers import MegatronTokenizer  # noqa: PLC0415
        from megatron.training.datasets.sft_dataset import SFTDataset  # noqa: PLC0415

        logging.disable(logging.WARNING)
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=pack_length,
            tokenizer=MegatronTokenizer.from_pretrained(
                folder, metadata_path={"library": "sft"}, prompt_format=prompt_format
            ),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            context_parallel_size=1,
        )
        return SFTDataset(rows, None, np.arange(len(rows)), len(rows), Split.train, config)


def main() -> None:
    """Measure the task on the command line and write the results to the file that the task names."""
    results = measure(msgspec.json.decode(sys.argv[1]))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
