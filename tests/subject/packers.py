"""Packing functions for the tests of the conformance levels: a right one, and one wrong one for each kind of fault.

The right one packs in order, masks its boundary labels and its padding by position, and cuts rows for ranks per document.
"""

from packproof_subject import Refused

# ruff: noqa: ARG001, ARG005 - all functions of a kind take the same arguments

CONVENTIONS = {"overlong": "refuse"}


def right(conversations, pack_length, pad_id, eos_id, context_parallel_size, change=lambda pack, size: pack):
    granularity = 2 * context_parallel_size if context_parallel_size > 1 else 1
    if pack_length % granularity:
        raise Refused("indivisible_segment", f"{granularity} does not divide {pack_length}")
    rows, room = [[]], pack_length
    for each in conversations:
        padded = -(-len(each["tokens"]) // granularity) * granularity
        if padded == 0:
            raise Refused("empty_conversation")
        if padded > pack_length:
            raise Refused("truncated", f"{len(each['tokens'])} tokens, and a row has {pack_length}")
        if padded > room:
            rows.append([])
            room = pack_length
        rows[-1].append(each)
        room -= padded
    if not rows[0]:
        raise Refused("empty_row")
    packs = [_row(each, pack_length, pad_id, granularity) for each in rows]
    return [_cut(change(pack, context_parallel_size), context_parallel_size) for pack in packs]


def _row(conversations, pack_length, pad_id, granularity):
    tokens, labels, mask, positions, boundaries = [], [], [], [], [0]
    for number, each in enumerate(conversations):
        own, length = each["tokens"], len(each["tokens"])
        padding = -length % granularity
        if number + 1 == len(conversations):
            padding = pack_length - len(tokens) - length
        tokens += own + [pad_id] * padding
        labels += own[1:] + [pad_id] * (padding + 1)
        mask += [int(flag) for flag in each["trained"][1:]] + [0] * (padding + 1)
        positions += range(length + padding)
        boundaries.append(len(tokens))
    return {"input_ids": tokens, "labels": labels, "mask": mask, "position_ids": positions, "cu_seqlens": boundaries}


def _cut(pack, size):
    if size > 1:
        index = [[] for _ in range(size)]
        for start, end in zip(pack["cu_seqlens"], pack["cu_seqlens"][1:], strict=False):
            chunk = (end - start) // (2 * size)
            for rank in range(size):
                for part in (rank, 2 * size - 1 - rank):
                    index[rank] += range(start + part * chunk, start + (part + 1) * chunk)
        names = ("input_ids", "labels", "mask", "position_ids")
        pack.setdefault("shards", [{name: [pack[name][at] for at in owned] for name in names} for owned in index])
    return pack


def _with(change):
    return lambda *arguments: right(*arguments, change=change)


def _shift_twice(pack, size):
    pack["labels"] = [*pack["labels"][1:], -100]
    return pack


def _leak(pack, size):
    for boundary in pack["cu_seqlens"][1:-1]:
        pack["labels"][boundary - 1], pack["mask"][boundary - 1] = pack["input_ids"][boundary], 1
    return pack


def _one_segment(pack, size):
    pack["cu_seqlens"] = [0, len(pack["input_ids"])]
    return pack


def _positions_go_on(pack, size):
    pack["position_ids"] = list(range(len(pack["input_ids"])))
    return pack


def _positions_stand(pack, size):
    pack["position_ids"] = [0] * len(pack["input_ids"])
    return pack


def _everything_trains(pack, size):
    pack["mask"] = [1] * len(pack["mask"])
    return pack


def _padding_trains(pack, size):
    pack["mask"][-1] = 1
    return pack


def _share_twice(pack, size):
    if size > 1:
        shards = _cut(dict(pack), size)["shards"]
        pack["shards"] = [shards[0], *shards[:-1]]
    return pack


def _own_label_lost(pack, size):
    if size > 1:
        shards = _cut(dict(pack), size)["shards"]
        for shard in shards:  # each rank shifts its own tokens, as if they were a row
            shard["labels"] = [*shard["input_ids"][1:], 0]
        pack["shards"] = shards
    return pack


shift_twice, leak, one_segment = _with(_shift_twice), _with(_leak), _with(_one_segment)
positions_go_on, everything_trains, padding_trains = (
    _with(_positions_go_on),
    _with(_everything_trains),
    _with(_padding_trains),
)
positions_stand = _with(_positions_stand)
share_twice, own_label_lost = _with(_share_twice), _with(_own_label_lost)


def loses_the_last(conversations, *arguments):
    return right(conversations[:-1] if len(conversations) > 1 else conversations, *arguments)


def wrong_token(conversations, *arguments):
    packs = right(conversations, *arguments)
    packs[0]["input_ids"][0] += 1
    return packs


def odd_chunks(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    return right(conversations, pack_length, pad_id, eos_id, 1)


def unshifted(*arguments):
    packs = right(*arguments)
    for pack in packs:
        pack["labels"], pack["mask"] = [-100, *pack["labels"][:-1]], [0, *pack["mask"][:-1]]
        pack["labels"] = [label if weight else -100 for label, weight in zip(pack["labels"], pack["mask"], strict=True)]
        pack.pop("shards", None)
        _cut(pack, arguments[-1])
    return packs


def refuses_all(*arguments):
    raise RuntimeError("no")


def without_shards(*arguments):
    packs = right(*arguments)
    for pack in packs:
        pack.pop("shards", None)
    return packs


def lacks_a_library(*arguments):
    import no_such_library  # noqa: F401
