"""An adapter with one fault, named on its command line: it builds rows of its own, or ends, hangs and prints where it must not.

It needs the standard library only, so that one start costs some 20 ms.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "subject"))

import packproof_subject

FAULT = sys.argv[1]
STDOUT = os.dup(1)
ANSWERED = []


def good(messages, pack_length):
    """A row in which token i is i + the number of messages."""
    ids = [index + len(messages) for index in range(pack_length)]
    return {
        "input_ids": ids,
        "target_ids": [*ids[1:], 0],
        "token_mask": [1.0] * pack_length,
        "position_ids": list(range(pack_length)),
        "cu_seqlens": [0, pack_length],
    }


def build_row(messages, _tokenizer, settings):
    row = good(messages, settings["pack_length"])
    ANSWERED.append(len(messages))
    print("a print of the adapter is harmless")
    if FAULT == "crash" and len(messages) == 3:
        print("about to end", file=sys.stderr, flush=True)
        os._exit(5)
    if FAULT == "killed" and len(messages) == 3:
        os.kill(os.getpid(), 11)
    if FAULT == "hang" and len(messages) == 3:
        time.sleep(1000)
    if FAULT == "slow":
        time.sleep(0.05)
    if FAULT == "garbage" and len(messages) == 3:
        os.write(STDOUT, b"epoch 1/3 loss 0.3\n")
    if FAULT == "closes_stdout" and len(messages) == 3:
        os.closerange(3, 20)
        time.sleep(1000)
    if FAULT == "shape":
        row["input_ids"] = [row["input_ids"]]
    if FAULT == "short":
        row["input_ids"] = row["input_ids"][1:]
    if FAULT == "fractions":
        row["input_ids"] = [each + 0.5 for each in row["input_ids"]]
    if FAULT == "nan":
        row["input_ids"] = [float("nan")] * settings["pack_length"]
    if FAULT == "words":
        row["input_ids"] = ["one"] * settings["pack_length"]
    if FAULT == "ragged":
        row["input_ids"] = [[1], [2, 3]]
    if FAULT == "keys":
        row["labels"] = row.pop("target_ids")
    if FAULT == "list":
        return [row]
    if FAULT == "flood":
        for _ in range(100):
            os.write(2, b"x" * (1 << 20))
    if FAULT == "raises" and len(messages) == 3:
        raise KeyError("role")
    if FAULT == "refuses":
        raise packproof_subject.Refused("role_order", "not mine")
    if FAULT == "maps":
        raise ValueError("the row is too long for me")
    if FAULT == "grandchild":
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        row["input_ids"] = [os.getpid(), sleeper.pid]
    if FAULT == "counts":
        row["input_ids"] = [os.getpid(), len(ANSWERED)]
    return row


def pack(conversations, pack_length, pad_id, eos_id, context_parallel_size):
    if FAULT == "raises":
        raise KeyError("tokens")
    if FAULT == "refuses":
        raise packproof_subject.Refused("truncated", "not mine")
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT == "no_list":
        return {"input_ids": []}
    if FAULT == "no_dict":
        return [[1, 2]]
    sizes = [pack_length, pad_id, eos_id, context_parallel_size]
    return [
        {"input_ids": each["tokens"], "labels": sizes, "mask": each["trained"], "sources": [number]}
        for number, each in enumerate(conversations)
    ]


if FAULT == "crash_at_start":
    print("no module named nothing", file=sys.stderr)
    sys.exit(3)
if FAULT == "hang_at_start":
    time.sleep(1000)
if FAULT == "noise_at_start":
    os.write(STDOUT, b"a banner\n" * 2000)
    print("another banner")
if FAULT == "no_serve":
    print("forgot to serve")
    sys.exit(0)
if FAULT == "protocol":
    packproof_subject.PROTOCOL = 99
packproof_subject.serve(
    build_row=build_row,
    pack=pack,
    conventions={"shift": "model", "tail": "none"},
    name="production" if FAULT == "name" else None,
    refusals={"too long for me": "truncated"},
    semantics=["strict"] if FAULT == "strict_only" else None,
    row_seconds=0.3 if FAULT in ("hang", "closes_stdout") else 60,
)
