"""Makes the packed sample and the raw chat sample from four files of real chat data; the same files give the same bytes."""
# ruff: noqa: INP001 - a script beside the data it made, run as `python -m examples.make_sample DATA`, and no package

import gzip
import hashlib
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from production.errors import PackproofError
from production.files.cache import write_file
from tools.pack_rows.output import describe_output, json_bytes, manifest, manifest_path
from tools.pack_rows.packing import PackedConversation, Packing, PackSettings, pack_files, row_line

HERE = Path(__file__).parent
TOKENIZER = HERE / "tokenizers" / "nemotron-mini"
PACKED = HERE / "packed" / "sample.jsonl.packed"
CHAT = HERE / "chat" / "sample.jsonl"
OWN = HERE / "chat" / "written_for_packproof.jsonl"
PACK_LENGTH = 2_048
OVERFULL_LENGTH = 2_304
"""What the overfull rows are packed for: read at PACK_LENGTH they lose the end of one conversation and some after it."""

SOURCES = ("chatterbot_28lang", "lmeval_mmlu_multiling", "bfcl_multi_turn", "mtbench_ref")
CHATTERBOT_LANGUAGES = {
    "bengali": 0,
    "chinese": 113,
    "dutch": 580,
    "english": 894,
    "french": 2919,
    "german": 3008,
    "hebrew": 3121,
    "hindi": 3170,
    "hinglish": 3222,
    "indonesian": 3253,
    "italian": 3416,
    "japanese": 3978,
    "korean": 4546,
    "marathi": 5000,
    "oriya": 5033,
    "persian": 5077,
    "portuguese": 5849,
    "russian": 6170,
    "spanish": 6213,
    "swedish": 6493,
    "tamil": 6536,
    "telugu": 6567,
    "thai": 6576,
    "traditionalchinese": 6582,
    "turkish": 7038,
    "ukrainian": 7131,
    "urdu": 7589,
    "yoruba": 7604,
}
"""Index of the first conversation in each language: the file is sorted by language."""
PER_LANGUAGE = 40
PRIVATE_LOOKING = re.compile(r"@|password|card_number|\d{4}-\d{4}-\d{4}-\d{4}|https?://", re.IGNORECASE)
"""Invented, all of it, but an address, a password or a card number in a repository costs somebody's time to find out."""

type Conversation = dict[str, Any]


def main(data: Path) -> None:
    """Write the samples from the folder `data`, which holds the four files of SOURCES as `.jsonl.gz`."""
    read = {name: _read(data / f"{name}.jsonl.gz") for name in SOURCES}
    chosen = {name: _choose(name, conversations) for name, conversations in read.items()}
    overfull = _chatterbot(read["chatterbot_28lang"], per_language=24, offset=1)
    overfull = [index for index in overfull if index not in set(chosen["chatterbot_28lang"])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        chosen_files = [_select(folder / f"{name}.jsonl", read[name], indices) for name, indices in chosen.items()]
        rest = _select(folder / "chatterbot_28lang_overfull.jsonl", read["chatterbot_28lang"], overfull)
        base = PackSettings(prompt_format="nemotron-nano-v2", pack_length=PACK_LENGTH, on_long="skip", seed=1)
        fitting = pack_files([*chosen_files, OWN], TOKENIZER, base)
        cut = pack_files([_too_long(folder / "too_long.jsonl", chosen_files, fitting)], TOKENIZER, _cut_settings())
        over = pack_files([rest], TOKENIZER, _overfull_settings())
    sources = {
        f"{name}.jsonl.gz": {
            "sha256": hashlib.sha256((data / f"{name}.jsonl.gz").read_bytes()).hexdigest(),
            "conversations": len(read[name]),
            "chosen": len(chosen[name]) + (len(overfull) if name == "chatterbot_28lang" else 0),
        }
        for name in SOURCES
    }
    _write_packed(sources, {"fitting": fitting, "cut": cut, "overfull": over})
    _write_chat(read)


def _cut_settings() -> PackSettings:
    return PackSettings(prompt_format="nemotron-nano-v2", pack_length=PACK_LENGTH, on_long="truncate")


def _overfull_settings() -> PackSettings:
    return PackSettings(prompt_format="nemotron-nano-v2", pack_length=OVERFULL_LENGTH, algorithm="sequential")


def _read(path: Path) -> list[Conversation]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().split("\n") if line]


def _choose(name: str, conversations: Sequence[Conversation]) -> list[int]:
    """Return the indices that go into the packed sample, spread evenly over the file."""
    if name == "chatterbot_28lang":
        return _chatterbot(conversations, per_language=PER_LANGUAGE, offset=0)
    usable = [i for i, conversation in enumerate(conversations) if _usable(conversation)]
    return usable if name == "mtbench_ref" else _spread(usable, {"bfcl_multi_turn": 240}.get(name, 160))


def _chatterbot(conversations: Sequence[Conversation], *, per_language: int, offset: int) -> list[int]:
    starts = [*CHATTERBOT_LANGUAGES.values(), len(conversations)]
    chosen = []
    for start, end in itertools.pairwise(starts):
        usable = [i for i in range(start + offset, end) if _usable(conversations[i])]
        chosen += _spread(usable, per_language)
    return chosen


def _usable(conversation: Conversation) -> bool:
    messages = conversation["messages"]
    return (
        messages[-1]["role"] == "assistant"
        and all(message["content"].strip() for message in messages)
        and not any(PRIVATE_LOOKING.search(message["content"]) for message in messages)
    )


def _spread[T](items: Sequence[T], count: int) -> list[T]:
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _select(path: Path, conversations: Sequence[Conversation], indices: Iterable[int]) -> Path:
    _write_lines(path, (conversations[index] for index in indices))
    return path


def _write_lines(path: Path, conversations: Iterable[Conversation]) -> None:
    text = "".join(json.dumps(conversation, ensure_ascii=False) + "\n" for conversation in conversations)
    write_file(path, text.encode())


def _too_long(path: Path, files: Sequence[Path], packing: Packing) -> Path:
    """Write the conversations that fit into no row, six at most: as many as show what being cut is like."""
    if unexpected := [refusal for refusal in packing.refused if refusal.kind != "too_long"]:
        raise PackproofError(
            what=f"a chosen conversation is refused: {unexpected[0]}", where="the sample", fix="choose others"
        )
    lines = [file.read_bytes().split(b"\n") for file in files]
    places = [refusal.place for refusal in packing.refused]
    write_file(path, b"".join(lines[place.input][place.line - 1] + b"\n" for place in _spread(places, 6)))
    return path


def _write_packed(sources: dict[str, Any], parts: dict[str, Packing]) -> None:
    fitting = list(parts["fitting"].rows)
    special = [("cut", row) for row in parts["cut"].rows]
    # The last of them may be no overfull one.
    special += [("overfull" if _tokens(row) > PACK_LENGTH else "fitting", row) for row in parts["overfull"].rows]
    rows = [("fitting", row) for row in fitting]
    for number, entry in enumerate(special):  # spread, so that a run over the first few rows meets some
        rows.insert(5 + number * (len(fitting) // len(special)), entry)
    lines, headless = [], []
    for number, (name, row) in enumerate(rows):
        line = row_line(row)
        # Megatron-LM takes a row whose first conversation has no system message: some rows show it.
        if number % 16 == 3 and name == "fitting" and row[0].system_inserted:
            line = _without_first_message(line)
            headless.append(number)
        lines.append(line)
    content = b"".join(lines)
    write_file(PACKED, content)
    report = {
        "format": "packproof-sample/1",
        "output": describe_output(PACKED.name, content),
        "pack_length": PACK_LENGTH,
        "sources": sources,
        "rows": {
            "of_one_conversation_that_is_cut": [i for i, (name, _) in enumerate(rows) if name == "cut"],
            "overfull": [i for i, (name, _) in enumerate(rows) if name == "overfull"],
            "without_a_leading_system_message": headless,
        },
        "overfull": _losses([row for name, row in special if name == "overfull"]),
        "parts": {name: manifest(packing) for name, packing in parts.items()},
    }
    write_file(manifest_path(PACKED), json_bytes(report))
    print(f"{PACKED}: {len(rows)} rows, {len(content) / 1e6:.2f} MB")


def _without_first_message(line: bytes) -> bytes:
    return (json.dumps({"messages": json.loads(line)["messages"][1:]}, ensure_ascii=False) + "\n").encode()


def _tokens(row: Sequence[PackedConversation]) -> int:
    return sum(conversation.padded for conversation in row)


def _losses(rows: Sequence[Sequence[PackedConversation]]) -> dict[str, int]:
    """Return what the overfull rows lose when they are read at PACK_LENGTH."""
    truncated = dropped = tokens = 0
    for row in rows:
        start = 0
        for conversation in row:
            end = start + conversation.padded
            tokens += max(0, end - max(start, PACK_LENGTH))
            # A row that is exactly full goes on, and the next conversation is cut to nothing.
            truncated += start < PACK_LENGTH < end
            dropped += start >= PACK_LENGTH
            start = end
    return {"conversations_truncated": truncated, "conversations_dropped_whole": dropped, "tokens_lost": tokens}


def _write_chat(read: dict[str, list[Conversation]]) -> None:
    """Write raw conversations for trying the packer, among them real ones that it must refuse."""
    chosen = [
        conversation
        for name, count in zip(SOURCES, (125, 25, 25, 10), strict=True)
        for conversation in _taken(read[name], count)
    ]
    empty = [
        conversation
        for conversation in read["bfcl_multi_turn"]
        if any(message["role"] == "assistant" and not message["content"] for message in conversation["messages"])
        and not PRIVATE_LOOKING.search(json.dumps(conversation))
    ]
    chosen += [empty[i] for i in _spread(range(len(empty)), 8)]
    user_only = [conversation for conversation in read["chatterbot_28lang"] if len(conversation["messages"]) == 1]
    chosen += user_only[:1]
    first, second = chosen[0]["messages"], chosen[1]["messages"]
    chosen += [
        {"messages": [{"role": "system", "content": "Be brief."}, *first, {"role": "system", "content": ""}, *second]},
        {"messages": [{"role": "System", "content": "Be brief."}, *first]},
        {"messages": [{"role": "narrator", "content": "A new day."}, *first]},
        {"messages": [first[1], first[0], first[1]]},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}, first[1]]},
    ]
    _write_lines(CHAT, chosen)
    print(f"{CHAT}: {len(chosen)} conversations")


def _taken(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    usable = [i for i, conversation in enumerate(conversations) if _usable(conversation)]
    return [conversations[i] for i in _spread(usable, count)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            "usage: python -m examples.make_sample FOLDER (holds the four .jsonl.gz files that examples/README.md names)"
        )
    main(Path(sys.argv[1]))
