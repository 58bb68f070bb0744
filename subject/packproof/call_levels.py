"""Levels L7 to L10: what a whole call loses, how its rows are cut for ranks, and equality to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Sequence

from packproof.rows import SHARD_FIELDS
from packproof.verdict import Judged


def judge_losses(judged: Judged) -> None:
    """L7: every token of every conversation is in a row, or its loss is declared or told."""
    told = {number for placed in judged.rows for number in placed.row.lost}
    there: Counter[int] = Counter()
    for placed in judged.rows:
        for span in placed.spans:
            there[span.conversation] += span.length
    for number in range(len(judged.case.conversations)):
        wanted = judged.inputs(number)
        if not wanted:
            continue
        judged.exercise()
        declared = judged.is_overlong(number) and {"cut": there[number] > 0, "drop": there[number] == 0}.get(
            judged.conventions["overlong"], False
        )
        if there[number] < wanted and number not in told and not declared:
            judged.miss(
                "%d of the %d tokens of conversation %d are in no row, and nothing tells of the loss"
                % (wanted - there[number], wanted, number)
            )


def judge_divisibility(judged: Judged) -> None:
    """L8: 2·cp divides every segment."""
    if judged.case.context_parallel_size == 1:
        return
    for number, placed in enumerate(judged.rows):
        found = placed.row.boundaries
        if found is None:
            judged.lacks("cu_seqlens or position_ids")
            continue
        judged.exercise()
        if placed.row.boundaries_from == "position_ids":
            judged.derive("position_ids")
        for segment, (start, end) in enumerate(zip(found, found[1:])):
            if (end - start) % judged.case.granularity:
                judged.miss(
                    "segment %d has %d tokens, which 2·cp = %d does not divide"
                    % (segment, end - start, judged.case.granularity),
                    number,
                    start,
                )


def judge_shards(judged: Judged) -> None:
    """L9: the ranks own every position once, each with the label, mask and position id that it has in the row."""
    size = judged.case.context_parallel_size
    if size == 1:
        return
    for number, placed in enumerate(judged.rows):
        shards, boundaries = placed.row.shards, placed.row.boundaries or []
        if shards is None and any(
            (end - start) % judged.case.granularity for start, end in zip(boundaries, boundaries[1:])
        ):
            continue  # there is no cut of such a row: L8
        if shards is None:
            judged.lacks("shards")
            continue
        judged.exercise()
        if len(shards) != size:
            judged.miss("there are %d shards, and cp is %d" % (len(shards), size), number)
            continue
        raw = placed.row.raw
        names = [name for name in SHARD_FIELDS if name in raw and all(name in shard for shard in shards)]
        owned = Counter(entry for shard in shards for entry in zip(*(shard[name] for name in names)))
        whole = Counter(zip(*(raw[name] for name in names)))
        for difference, what in (
            (owned - whole, "owned by a rank and not in the row, or owned twice"),
            (whole - owned, "in the row and owned by no rank"),
        ):
            if difference:
                entry = ", ".join("%s %d" % pair for pair in zip(names, min(difference)))
                judged.miss(f"a position is {what}: {entry}", number)


def judge_bits(judged: Judged) -> None:
    """L10: the call returns one row that equals the preset's row in every field; declared conventions are not undone first."""
    expected = judged.case.expected.get(judged.preset)
    if expected is None:
        return
    judged.exercise()
    if "refusal" in expected:
        judged.miss("the preset {} refuses ({}), and rows were built".format(judged.preset, expected["refusal"]))
        return
    if len(judged.rows) != 1:
        judged.miss("there are %d rows, and the preset builds one" % len(judged.rows))
        return
    raw = judged.rows[0].row.raw
    for name, values in expected.items():
        if name in ("shards", "depths"):
            if name in raw and [dict(each) for each in raw[name]] != values:
                judged.miss(f"{name} are not the preset's", 0)
        elif name not in raw:
            judged.miss(f"the row has no {name}", 0)
        elif raw[name] != values:
            at = next(
                (at for at, pair in enumerate(zip(raw[name], values)) if pair[0] != pair[1]),
                min(len(raw[name]), len(values)),
            )
            judged.miss(
                "%s[%d] is %s, and the preset %s has %s"
                % (name, at, _at(raw[name], at), judged.preset, _at(values, at)),
                0,
                at,
            )


def _at(values: Sequence[int], at: int) -> str:
    return str(values[at]) if at < len(values) else "not there"
