"""Draw what a job's loader reads: a file of rows, an order of them, a rank's share, and how many worker processes prepare it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from equivalence.generators.choices import Choices


@dataclass(frozen=True, kw_only=True)
class LoaderCase:
    """Some steps of one rank."""

    rows: tuple[tuple[int, ...], ...]
    """Of each row the words of each conversation's answer."""
    tokenizer: str
    """`huge-words` has ids beyond 2**16."""
    prompt_format: str
    pack_length: int
    context_parallel_size: int
    data_size: int
    """dp."""
    rank: int
    microbatches: int
    """Of each rank in a global batch."""
    seed: int
    """Of the shuffle and of the words."""
    workers: int
    prefetch: int
    before: int
    """Steps that are read before the loader goes to `start`."""
    start: int
    """Steps consumed where it goes on."""
    steps: int
    """Read from there."""
    counts: tuple[int, ...]
    """Counts of some ranks."""

    @property
    def global_batch_size(self) -> int:
        """Rows of a global batch."""
        return self.data_size * self.microbatches

    @property
    def consumed(self) -> int:
        """Samples consumed before the loader resumes."""
        return self.start * self.global_batch_size

    def messages(self) -> list[list[dict[str, str]]]:
        """Return the messages of each row."""
        words = random.Random(self.seed)  # noqa: S311 - not for secrets

        def text(count: int) -> str:
            return "".join(f"w{words.randrange(100)} " for _ in range(count))

        return [
            [
                message
                for count in row
                for message in (
                    {"role": "system", "content": text(1)},
                    {"role": "user", "content": text(2)},
                    {"role": "assistant", "content": text(count)},
                )
            ]
            for row in self.rows
        ]


def draw_loader(choices: Choices) -> LoaderCase:
    """Draw one to nine rows, most of which fit; some are cut and lose conversations."""
    size = choices.one_of((1, 1, 2, 4))
    unit = 1 if size == 1 else 2 * size
    rows = [tuple(choices.integers(1, 9, fewest=1, longest=4)) for _ in range(choices.integer(1, 9))]
    data = choices.integer(1, 3)
    return LoaderCase(
        rows=tuple(rows),
        tokenizer=choices.one_of(("huge-words", "word", "huge-words")),
        prompt_format=choices.one_of(("identity", "nemotron-h-aligned", "nemotron-nano-v2")),
        pack_length=unit * choices.integer(max(1, 16 // unit), 96 // unit),
        context_parallel_size=size,
        data_size=data,
        rank=choices.integer(0, data - 1),
        microbatches=choices.integer(1, 3),
        seed=choices.integer(0, 2**32),
        workers=choices.one_of((1, 0, 2)),
        prefetch=choices.integer(1, 3),
        before=choices.integer(0, 2),
        start=choices.integer(0, 4),
        steps=choices.integer(1, 4),
        counts=tuple(choices.integers(0, 2**50, fewest=1, longest=64)),
    )
