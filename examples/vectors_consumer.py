"""Hold a loader to packproof's test vectors with the standard library alone: `python vectors_consumer.py FOLDER [PRESET]`.

FOLDER is what `packproof vectors FOLDER` wrote. `build_row` stands for your own loader; here it is the rules of Megatron-LM in thirty
lines. Exit status 0: every row is equal to the preset's; 1: some differ; 2: the vectors cannot be used.
"""

import hashlib
import json
import sys
from pathlib import Path

FIELDS = ("input_ids", "labels", "mask", "position_ids", "cu_seqlens")


def build_row(conversations, pack_length, pad_id, context_parallel_size):
    """Return the one row of these conversations as Megatron-LM 0.19 builds it, or the kind of its refusal."""
    granularity = 2 * context_parallel_size if context_parallel_size > 1 else 1
    tokens, targets, positions, boundaries = [], [], [], [0]
    for each in conversations:
        padding = -(len(tokens) + len(each["tokens"])) % granularity
        padding = padding if positions or each["tokens"] else 0
        tokens += each["tokens"] + [pad_id] * padding
        targets += [token if trained else -100 for token, trained in zip(each["tokens"], each["trained"])]
        targets += [pad_id] * padding
        last = len(each["tokens"]) if each["tokens"] else (positions[-1] + 1 if positions else 0)
        positions += [*range(len(each["tokens"])), *range(last, last + padding)]
        boundaries.append(len(tokens))
        if len(tokens) > pack_length:  # the row is full: what lies beyond is cut
            tokens, targets = tokens[:pack_length], targets[:pack_length]
            break
    if not positions:
        return "empty_row"
    missing = pack_length + 1 - len(tokens)
    tokens, targets = tokens + [pad_id] * missing, targets + [pad_id] * missing
    positions += range(positions[-1] + 1, positions[-1] + 1 + missing)
    boundaries[-1] = pack_length
    if len(boundaries) > pack_length + 1:
        return "too_many_boundaries"
    labels = targets[1:]
    mask = [int(label not in (pad_id, -100)) for label in labels]
    boundaries = boundaries[: boundaries.index(pack_length) + 1]
    return dict(zip(FIELDS, (tokens[:pack_length], labels, mask, positions[:pack_length], boundaries)))


def main(folder, preset="megatron-lm-0.19"):
    """Compare every case; print the first difference and the count."""
    about = json.loads((folder / "manifest.json").read_text())
    content = (folder / "vectors.jsonl").read_bytes()
    if about["format"] != 1 or hashlib.sha256(content).hexdigest() != about["sha256"]["vectors.jsonl"]:
        print(f"{folder}: vectors of another format, or changed; write them again", file=sys.stderr)
        return 2
    different = []
    for case in map(json.loads, content.decode().splitlines()):
        names = ("conversations", "pack_length", "pad_id", "context_parallel_size")
        row, expected = build_row(*(case[name] for name in names)), case["expected"][preset]
        if isinstance(row, str):
            is_equal = row == expected.get("refusal")
        else:
            is_equal = all(row[name] == expected.get(name) for name in FIELDS)
        if not is_equal:
            different.append((case["id"], case["meta"]["class"], row, expected))
    for each in different[:1]:
        print("first difference:", *each, sep="\n  ")
    print(f"{about['cases'] - len(different)} of {about['cases']} rows are equal to {preset}'s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
