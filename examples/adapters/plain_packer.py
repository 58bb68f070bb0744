"""An adapter of a packing function in plain Python: the example of docs/guides/ci-check.md.

Replace `pack` by a call of your own code. It needs Python 3.8 and packproof_subject.py beside it.
"""

from packproof_subject import serve

IGNORE = -100
CONVENTIONS = {"shift": "model", "pad_label": "ignore"}


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    """Lay conversations end to end, in order, into rows of `pack_length`; the model shifts the labels."""
    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    rows = []
    for number, conversation in enumerate(conversations):
        tokens, trained = conversation["tokens"], conversation["trained"]
        if not tokens:
            continue  # it would be a segment without a token
        needed = -(-len(tokens) // multiple) * multiple
        if not rows or len(rows[-1]["input_ids"]) + needed > pack_length:
            rows.append({"input_ids": [], "labels": [], "position_ids": [], "cu_seqlens": [0], "sources": []})
        row = rows[-1]
        padding = needed - len(tokens)
        row["input_ids"] += tokens + [pad_id] * padding
        # Nothing in its own conversation predicts the first token, so that it never trains.
        labels = [token if trains and at else IGNORE for at, (token, trains) in enumerate(zip(tokens, trained))]
        row["labels"] += labels + [IGNORE] * padding
        row["position_ids"] += range(needed)
        row["cu_seqlens"].append(len(row["input_ids"]))
        row["sources"].append(number)
    for row in rows:
        finish(row, pack_length, pad_id)
    return rows


def finish(row, pack_length, pad_id):
    """Cut what is too long, and pad the rest: the padding joins the last conversation's segment."""
    for name, value in (("input_ids", pad_id), ("labels", IGNORE)):
        row[name] = (row[name] + [value] * pack_length)[:pack_length]
    first = row["position_ids"][-1] + 1 if row["position_ids"] else 0
    positions = row["position_ids"] + list(range(first, first + pack_length))
    row["position_ids"] = positions[:pack_length]
    row["cu_seqlens"] = [*row["cu_seqlens"][:-1], pack_length]


if __name__ == "__main__":
    # Of packproof's semantics `strict` is what this function does: no label crosses a boundary, and no mask is made by value.
    serve(pack=pack, conventions=CONVENTIONS, semantics=["strict"], name="plain_packer")
