"""Levels L1 to L6: properties of the tokens, labels, positions and boundaries of a row."""

from __future__ import annotations

from packproof.placement import PlacedRow
from packproof.rows import IGNORE_INDEX
from packproof.verdict import Judged


def judge_tokens(judged: Judged) -> None:
    """L1: every token is a conversation's next one or padding, and conversations are whole and in order."""
    case, last = judged.case, -1
    if any(judged.inputs(number) for number in range(len(case.conversations))):
        judged.exercise()
    for number, placed in enumerate(judged.rows):
        if placed.foreign is not None:
            token = placed.row.tokens[placed.foreign]
            judged.miss(
                "token %d is neither the next of a conversation nor padding (pad id %d)" % (token, case.pad_id),
                number,
                placed.foreign,
            )
        length, wanted = len(placed.row.tokens), judged.conventions["row_length"]
        if wanted in ("P", "P+1") and length != case.pack_length + (wanted == "P+1"):
            judged.miss(
                "the row has %d positions, and row_length: %s means %d"
                % (length, wanted, case.pack_length + (wanted == "P+1")),
                number,
            )
        for span in placed.spans:
            if judged.conventions["order"] == "kept" and span.conversation < last:
                judged.miss(
                    "conversation %d comes after conversation %d" % (span.conversation, last), number, span.start
                )
            last = max(last, span.conversation)


def judge_pairs(judged: Judged) -> None:
    """L2: inside a conversation the same pairs of a token and its label train."""
    dropped = judged.conventions["last_token"] == "dropped"
    for number, placed in enumerate(judged.rows):
        for span in placed.spans:
            tokens = judged.tokens(span)
            is_whole = span.offset + span.length == judged.inputs(span.conversation)
            for at in range(span.length - (0 if dropped and is_whole else 1)):
                source = span.offset + at + 1
                position = span.start + at
                if source >= len(tokens):
                    continue
                judged.exercise()
                trained, label = placed.row.trained[position], placed.row.labels[position]
                if trained and not judged.trains(span, source):
                    judged.miss(
                        "token %d of conversation %d trains as a label (%d), and it must not"
                        % (source, span.conversation, label),
                        number,
                        position,
                    )
                elif trained and label != tokens[source]:
                    judged.miss(
                        "the label is %d, and the next token of conversation %d is %d"
                        % (label, span.conversation, tokens[source]),
                        number,
                        position,
                    )
                elif not trained and judged.trains(span, source):
                    judged.miss(
                        "token %d of conversation %d (id %d) does not train, and it must"
                        % (source, span.conversation, tokens[source]),
                        number,
                        position,
                    )


def judge_boundary_labels(judged: Judged) -> None:
    """L3: the last token of a conversation trains nothing of the next one, and nothing past the row's end."""
    dropped = judged.conventions["last_token"] == "dropped"
    for number, placed in enumerate(judged.rows):
        starts = {span.start: span for span in placed.spans}
        for span in placed.spans:
            position, follower = span.end - 1, starts.get(span.end)
            if follower is None and span.end < len(placed.row.tokens):
                continue  # padding follows: L6
            if follower is not None and (dropped or judged.trains(follower, follower.offset)):
                judged.exercise()
            source = span.offset + span.length
            tokens = judged.tokens(span)
            own = (
                source < len(tokens) and placed.row.labels[position] == tokens[source]
            )  # cut or dropped: its own next token
            if placed.row.trained[position] and not own:
                where = (
                    "the first token of conversation %d" % follower.conversation
                    if follower
                    else "nothing: the row ends here"
                )
                judged.miss(
                    "the last token of conversation %d trains the label %d; next comes %s"
                    % (span.conversation, placed.row.labels[position], where),
                    number,
                    position,
                )


def judge_positions(judged: Judged) -> None:
    """L4: positions count from 0 in each conversation; those of padding follow the convention."""
    kind = judged.conventions["pad_positions"]
    for number, placed in enumerate(judged.rows):
        positions = placed.row.positions
        if positions is None:
            judged.lacks("position_ids")
            continue
        for span in placed.spans:
            judged.exercise()
            first = positions[span.start]
            if first not in (0, span.offset):
                judged.miss(
                    "conversation %d begins at position id %d, and it must be 0" % (span.conversation, first),
                    number,
                    span.start,
                )
            for at in range(1, span.length):
                if positions[span.start + at] != first + at:
                    judged.miss(
                        "position id %d where %d follows" % (positions[span.start + at], first + at),
                        number,
                        span.start + at,
                    )
                    break
        for at in range(1, len(positions)):
            if placed.padding[at]:
                begins = not placed.padding[at - 1]
                wanted = 0 if kind == "zero" or (kind == "restart" and begins) else positions[at - 1] + 1
                if positions[at] != wanted:
                    judged.miss(
                        "padding has position id %d, and pad_positions: %s means %d" % (positions[at], kind, wanted),
                        number,
                        at,
                    )
                    break


_DERIVED_TAIL = {"continue": "joins", "restart": "own", "zero": "each"}
"""The tail that boundaries have which come from the positions of padding."""


def judge_boundaries(judged: Judged) -> None:
    """L5: every conversation begins and ends at a boundary, no other boundary is there, and no segment is empty."""
    for number, placed in enumerate(judged.rows):
        found = placed.row.boundaries
        if found is None:
            judged.lacks("cu_seqlens or position_ids")
            continue
        tail = judged.conventions["tail"]
        if placed.row.boundaries_from == "position_ids":
            judged.derive("position_ids")
            tail = _DERIVED_TAIL[judged.conventions["pad_positions"]]
        if not placed.spans:
            continue
        judged.exercise()
        empty = [at for at, (start, end) in enumerate(zip(found, found[1:])) if start >= end]
        if empty:
            judged.miss("segment %d is empty: boundaries %s" % (empty[0], found), number, found[empty[0]])
            continue
        end = (
            found[-1]
            if found[-1] == len(placed.row.tokens) - 1 and judged.conventions["row_length"] == "P+1"
            else len(placed.row.tokens)
        )
        wanted = _wanted_boundaries(placed, found, tail, end, judged.case.granularity)
        if found != wanted:
            judged.miss(f"boundaries are {found}, and the conversations have {wanted} (tail: {tail})", number)
        lengths = placed.row.lengths
        if lengths is not None and lengths[: len(placed.spans)] != [span.length for span in placed.spans]:
            judged.miss(
                f"cu_seqlens counts {lengths} tokens of conversations, and there are {[span.length for span in placed.spans]}",
                number,
            )


def _wanted_boundaries(placed: PlacedRow, found: list[int], tail: str, end: int, granularity: int) -> list[int]:
    """Return the boundaries that a row's conversations have; where the last segment's own padding ends is read from what was found."""
    inner = [0] + [span.start for span in placed.spans[1:]]
    if tail == "joins":
        return [*inner, end]
    last = placed.spans[-1].end
    possible = [boundary for boundary in found if last <= boundary < last + granularity]
    last = possible[0] if possible else last
    if tail == "none" or last >= end:
        return [*inner, last]
    return [*inner, last, end] if tail == "own" else [*inner, *range(last, end + 1)]


def judge_padding(judged: Judged) -> None:
    """L6: no padding is an input or a label that trains."""
    for number, placed in enumerate(judged.rows):
        row, padding = placed.row, placed.padding
        own_labels = {span.end - 1: span for span in placed.spans}
        for at in range(len(row.tokens)):
            follows = at + 1 < len(padding) and padding[at + 1]
            if not padding[at] and not follows:
                continue
            judged.exercise()
            if padding[at] and row.trained[at]:
                judged.miss("padding trains the label %d" % row.labels[at], number, at)
            elif row.trained[at]:
                span = own_labels.get(at)
                tokens = judged.tokens(span) if span else []
                if (
                    span is None
                    or span.offset + span.length >= len(tokens)
                    or row.labels[at] != tokens[span.offset + span.length]
                ):
                    judged.miss("padding is the label (%d) and trains" % row.labels[at], number, at)
            elif padding[at] and follows:
                wanted = judged.case.pad_id if judged.conventions["pad_label"] == "pad" else IGNORE_INDEX
                other = IGNORE_INDEX if wanted != IGNORE_INDEX else judged.case.pad_id
                if row.labels[at] == other:
                    judged.miss(
                        "the label under padding is %d, and pad_label: %s means %d"
                        % (other, judged.conventions["pad_label"], wanted),
                        number,
                        at,
                    )
