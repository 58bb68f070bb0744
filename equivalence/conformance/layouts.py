"""Cases of the test vectors, aimed at each class of layouts: conversations as tokens, pack length, cp, padding, depths.

Nothing is random: a class lists what decides its rows, and tokens are counted through.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packproof.cases import FIRST_TOKEN, TOKENS, Case

SIZES = (1, 2, 3, 4, 8)
"""Context parallel sizes of the vectors."""
PAD, EOS = 0, 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Settings and lengths that decide a row, before tokens are given out."""

    what: str
    """The class that the case is aimed at."""
    lengths: Sequence[int]
    """Tokens of each conversation."""
    room: int
    """Positions that the row has more than the padded conversations need; negative: fewer."""
    size: int = 1
    trained: str = "all"
    """`all`, `answer` (the second half of each conversation), `none`, `last`, or `alternating`."""
    pad_at: tuple[int, int] | None = None
    """Conversation and token that hold the pad id."""
    pad_id: int = PAD
    same: tuple[int, int] | None = None
    """Two conversations: the second one begins with the tokens of the first."""
    pack_length: int | None = None
    """Instead of `room`."""


def layouts() -> Iterator[Layout]:
    """Yield every case of every class."""
    for size in SIZES:
        yield from _plain(size)
        yield from _full(size)
        yield from _empty(size)
        yield from _pads(size)
    yield from _trained()
    yield from _indivisible()
    yield from _many()


def _plain(size: int) -> Iterator[Layout]:
    chunk = 2 * size if size > 1 else 4
    for room in (0, chunk, 3 * chunk):
        for trained in ("all", "answer"):
            yield Layout(what="one conversation", lengths=(5,), room=room, size=size, trained=trained)
            yield Layout(what="conversations and padding", lengths=(5, 3, 6), room=room, size=size, trained=trained)
    for length in (chunk - 1, chunk, chunk + 1):
        yield Layout(what="around a chunk", lengths=(length, length), room=0, size=size)
        yield Layout(what="around a chunk", lengths=(length, length), room=chunk, size=size, trained="answer")
    yield Layout(what="one token each", lengths=(1, 1, 1, 1), room=0, size=size)
    yield Layout(what="one token each", lengths=(1, 1, 1, 1), room=2 * chunk, size=size)
    yield Layout(what="equal conversations", lengths=(3, 3, 3), room=chunk, size=size, same=(0, 1))
    yield Layout(what="one conversation begins as another", lengths=(3, 6), room=chunk, size=size, same=(0, 1))


def _full(size: int) -> Iterator[Layout]:
    chunk = 2 * size if size > 1 else 2
    yield Layout(what="longer than the row", lengths=(2 * chunk + 1,), room=0, pack_length=2 * chunk, size=size)
    yield Layout(what="longer than the row", lengths=(5 * chunk,), room=0, pack_length=2 * chunk, size=size)
    yield Layout(what="longer than the row", lengths=(5 * chunk, 3), room=0, pack_length=2 * chunk, size=size)
    yield Layout(what="cut in the row", lengths=(3, 2 * chunk), room=-chunk, size=size)
    yield Layout(what="cut in the row", lengths=(3, 2 * chunk, 4), room=-2 * chunk, size=size, trained="answer")
    yield Layout(what="after a full row", lengths=(chunk, chunk, 3), room=0, pack_length=2 * chunk, size=size)
    yield Layout(what="after a full row", lengths=(2 * chunk, 1), room=0, pack_length=2 * chunk, size=size)
    yield Layout(what="after a full row", lengths=(2 * chunk, 1, 2), room=0, pack_length=2 * chunk, size=size)


def _empty(size: int) -> Iterator[Layout]:
    chunk = 2 * size if size > 1 else 3
    for lengths in ((0, 3), (3, 0), (2, 0, 3), (2, 0, 0, 3), (0,)):
        yield Layout(what="empty conversation", lengths=lengths, room=chunk, size=size)
    yield Layout(what="empty conversation", lengths=(2, 0, 3), room=0, size=size, trained="answer")


def _pads(size: int) -> Iterator[Layout]:
    chunk = 2 * size if size > 1 else 2
    for pad_id in (PAD, EOS):
        for place in ((0, 1), (0, 3), (1, 0), (1, 3)):
            yield Layout(
                what="pad id in a conversation", lengths=(4, 4), room=chunk, size=size, pad_at=place, pad_id=pad_id
            )
        yield Layout(
            what="pad id in a conversation",
            lengths=(4, 4),
            room=0,
            size=size,
            pad_at=(0, 3),
            pad_id=pad_id,
            trained="answer",
        )


def _trained() -> Iterator[Layout]:
    for trained, size in itertools.product(("none", "last", "alternating"), (1, 2, 4)):
        yield Layout(what="what trains", lengths=(4, 1, 6), room=2 * size, size=size, trained=trained)
        yield Layout(what="what trains", lengths=(2, 3), room=0, size=size, trained=trained)


def _indivisible() -> Iterator[Layout]:
    for size in SIZES[1:]:
        for more in (1, size):
            yield Layout(what="2·cp does not divide the row", lengths=(3, 4), room=more, size=size)
            yield Layout(what="2·cp does not divide the row", lengths=(3,), room=more, size=size)


def _many() -> Iterator[Layout]:
    for size in SIZES:
        yield Layout(what="many conversations", lengths=(3, 1, 5, 2, 4, 1, 7, 2, 3, 6, 1, 2), room=2 * size, size=size)
        yield Layout(what="many conversations", lengths=(2,) * 30, room=0, size=size, trained="alternating")
    for pack_length in (1, 2, 4):
        yield Layout(
            what="more boundaries than positions",
            lengths=(0,) * (pack_length + 2) + (1,),
            room=0,
            pack_length=pack_length,
        )
        yield Layout(
            what="more boundaries than positions",
            lengths=(1, *((0,) * (pack_length + 1))),
            room=0,
            pack_length=pack_length,
        )
    yield Layout(what="no conversation", lengths=(), room=0, pack_length=8)


def cases() -> list[Case]:
    """Return all cases without expected rows. Depths go from 0 to 3 in turn."""
    return [_case(number, layout) for number, layout in enumerate(layouts())]


def _case(number: int, layout: Layout) -> Case:
    granularity = 2 * layout.size if layout.size > 1 else 1
    words = itertools.cycle(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS))
    for _ in range(7 * number % TOKENS):  # so that no token stands for a place
        next(words)
    tokens = [[next(words) for _ in range(length)] for length in layout.lengths]
    if layout.same is not None:
        first, second = layout.same
        tokens[second][: len(tokens[first])] = tokens[first]
    if layout.pad_at is not None:
        tokens[layout.pad_at[0]][layout.pad_at[1]] = layout.pad_id
    needed = sum(-(-length // granularity) * granularity for length in layout.lengths)
    pack_length = layout.pack_length if layout.pack_length is not None else max(granularity, needed + layout.room)
    return Case(
        id=f"v1-{number:04d}",
        set="",
        conversations=tuple({"tokens": each, "trained": _trained_of(layout.trained, len(each))} for each in tokens),
        pack_length=pack_length,
        pad_id=layout.pad_id,
        eos_id=EOS,
        context_parallel_size=layout.size,
        meta={"class": layout.what, "depths": number % 4},
    )


def _trained_of(kind: str, length: int) -> list[int]:
    if kind == "answer":
        return [int(2 * at >= length) for at in range(length)]
    if kind == "last":
        return [int(at + 1 == length) for at in range(length)]
    return [{"all": 1, "none": 0, "alternating": at % 2}[kind] for at in range(length)]
