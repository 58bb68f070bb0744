"""Packing at scale: inputs of every kind, any number of processes, a kill at any chunk, and nothing lost on the way."""

import functools
import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from production.errors import PackproofError
from production.files.source import open_source
from production.online import packing as packers
from production.tokens.prompts import split_conversations
from tools.pack_rows import PackSettings, inputs, lengths, main, pack_files, packing
from tools.pack_rows.cli import work_folder
from tools.pack_rows.layouts import layout_of, messages_of
from tools.pack_rows.output import write_rows
from tools.pack_rows.packing import row_line
from tools.pack_rows.rows import rows_of
from tools.pack_rows.spool import Spool

EXAMPLES = Path(__file__).parents[2] / "examples"
MINI = EXAMPLES / "tokenizers" / "nemotron-mini"
CHAT = EXAMPLES / "chat" / "sample.jsonl"
load_cached = functools.cache(lengths.load_folder)


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    monkeypatch.setattr(lengths, "load_folder", load_cached)


@pytest.fixture
def small_chunks(monkeypatch):
    """Files of a few lines are several chunks."""
    monkeypatch.setattr(inputs, "CHUNK_LINES", 8)


def settings(**changed):
    return PackSettings(
        **{"prompt_format": "nemotron-nano-v2", "pack_length": 256, "on_bad": "skip", "on_long": "skip"} | changed
    )


def run(*arguments):
    return main([*map(str, arguments), "--tokenizer", str(MINI), "--pack-length", "256", "--processes", "1"])


def chat(index, turns=1, words=3):
    messages = [{"role": "system", "content": f"s{index}"}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {index} {turn}"},
            {"role": "assistant", "content": "word " * words + str(turn)},
        ]
    return messages


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return path


def packed_lines(packing):
    return [row_line(row) for row in packing.rows]


def unpacked(path):
    with open_source(path) as source:
        rows = [split_conversations(messages) for messages in source]
    return [row.conversation(number) for row in rows for number in range(row.count)]


# --- packers


@hypothesis.given(st.lists(st.integers(1, 40), max_size=80), st.integers(40, 60))
def test_runs_of_equal_lengths_are_placed_as_one_by_one(sizes, capacity):
    """R-PACK-2 in both ways: whole runs at once, and each through the tree."""
    array = np.array(sizes, dtype=np.int64)
    by_runs = packers.assign_decreasing(array, capacity)
    order = packers.decreasing_order(array)
    rooms = [capacity] * len(sizes)
    for index in order.tolist():
        number = next(number for number, room in enumerate(rooms) if room >= sizes[index])
        rooms[number] -= sizes[index]
        assert by_runs[index] == number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packers, "_RUNS_PAY", -1)
        assert packers.assign_decreasing(array, capacity).tolist() == by_runs.tolist()


@hypothesis.given(
    st.lists(st.integers(1, 40), max_size=60),
    st.sampled_from(["first_fit_decreasing", "concatenative", "modified_first_fit_decreasing", "first_fit_shuffle"]),
    st.sampled_from([None, 3]),
)
def test_every_packer_of_the_online_path_makes_the_rows(sizes, algorithm, seed):
    if algorithm == "first_fit_shuffle":
        seed = 3
    order, starts = rows_of(np.array(sizes, dtype=np.int64), 40, algorithm=algorithm, seed=seed)
    rows = [order[first:last].tolist() for first, last in itertools.pairwise(starts)]
    assert sorted(order.tolist()) == list(range(len(sizes)))
    if algorithm == "concatenative" and seed is not None:
        return  # the drawn order decides
    told = packers.pack(sizes, 40, algorithm=algorithm, seed=seed if algorithm == "first_fit_shuffle" else None)
    assert sorted(map(sorted, rows)) == sorted(map(sorted, told))


# --- inputs


@pytest.fixture
def expected(tmp_path):
    conversations = [chat(index) for index in range(30)]
    plain = write(tmp_path / "plain.jsonl", conversations)
    return conversations, plain, packed_lines(pack_files([plain], MINI, settings()))


def test_packed_files_parquet_and_folders_give_the_rows_of_the_plain_file(tmp_path, expected):
    conversations, plain, rows = expected
    from pyarrow import Table, parquet

    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    lines = plain.read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:10]))
    (folder / "b" / "c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[10:])))
    (folder / "notes.txt").write_text("not a chat file")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "x.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    parquet.write_table(Table.from_pylist([{"messages": each} for each in conversations]), tmp_path / "x.parquet")
    for path in (tmp_path / "x.jsonl.gz", tmp_path / "x.jsonl.zst", tmp_path / "x.parquet", folder):
        assert packed_lines(pack_files([path], MINI, settings())) == rows, path


def test_standard_input_is_read_as_it_comes(monkeypatch, expected):
    _, plain, rows = expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(plain.read_bytes())))
    packing = pack_files([Path("-")], MINI, settings())
    assert packed_lines(packing) == rows
    again = pack_files([plain], MINI, settings())
    assert packing.inputs[0].sha256 == again.inputs[0].sha256
    with pytest.raises(PackproofError, match="cannot be read again"):
        pack_files([Path("-")], MINI, settings(), resume=True)


def test_a_parquet_file_keeps_keys_that_only_some_messages_have(tmp_path):
    from pyarrow import Table, parquet

    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "n"}]]
    parquet.write_table(Table.from_pylist([{"messages": each} for each in messages]), tmp_path / "x.parquet")
    packing = pack_files([tmp_path / "x.parquet"], MINI, settings())
    assert '{"role": "user", "content": "q"}' in packing.rows[0][0].json
    assert '"name": "n"' in packing.rows[0][0].json
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(PackproofError, match="cannot be read as Parquet"):
        pack_files([tmp_path / "bad.parquet"], MINI, settings())


def test_a_folder_without_a_chat_file_and_a_file_named_twice_are_refused(tmp_path):
    with pytest.raises(PackproofError, match="no file that ends in"):
        pack_files([tmp_path], MINI, settings())
    plain = write(tmp_path / "a.jsonl", [chat(0)])
    with pytest.raises(PackproofError, match="given twice"):
        pack_files([tmp_path, plain], MINI, settings())


SHAREGPT = {
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "observation", "value": "t"}],
    "system": "s",
    "id": 7,
}  # fmt: skip
ALPACA = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "id": 7}


def test_other_layouts_become_the_messages_that_they_mean():
    assert layout_of(SHAREGPT, "messages") == "sharegpt"
    assert messages_of(SHAREGPT, "sharegpt", "messages") == (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "tool", "content": "t"},
        ],
        {"id": 7},
    )
    assert layout_of(ALPACA, "messages") == "alpaca"
    assert messages_of(ALPACA, "alpaca", "messages") == (
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "do\n\nthis"},
            {"role": "assistant", "content": "done"},
        ],
        {"id": 7},
    )
    assert layout_of({"messages": [{"role": "user", "content": "x"}]}, "messages") == "messages"
    assert layout_of({"text": "x"}, "messages") == "messages"


def test_the_layout_of_each_file_is_found_and_named(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps(SHAREGPT) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(ALPACA) + "\n")
    write(tmp_path / "c.jsonl", [chat(0)])
    out = tmp_path / "out.packed"
    assert run(*(tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")), "--out", out) == 0
    report = json.loads((tmp_path / "out.packed.manifest.json").read_bytes())
    assert [each["layout"] for each in report["inputs"]] == ["sharegpt", "alpaca", "messages"]
    assert "layout of a.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "layout", "kind"),
    [
        ({"conversations": []}, "sharegpt", "sharegpt_shape"),
        ({"conversations": [{"from": "human"}]}, "sharegpt", "sharegpt_shape"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", "unknown_role"),
        ({"conversations": [{"from": "human", "value": 3}]}, "sharegpt", "sharegpt_shape"),
        ({"instruction": "x"}, "alpaca", "alpaca_shape"),
        ({"instruction": "x", "output": None}, "alpaca", "alpaca_shape"),
        ({"instruction": "x", "output": "y", "history": [["q"]]}, "alpaca", "alpaca_shape"),
    ],
)
def test_lines_that_a_layout_cannot_read_are_refused_by_name(tmp_path, line, layout, kind):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    packing = pack_files([path], MINI, settings(layout=layout))
    assert [(each.kind, each.place.line) for each in packing.refused] == [(kind, 1)]


def test_equal_keys_of_other_layouts_are_refused_as_those_of_messages_are(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"instruction": "x", "output": "y", "output": "z"}\n{"instruction": "x"\n[]')
    packing = pack_files([path], MINI, settings(layout="alpaca"))
    assert [each.kind for each in packing.refused] == ["duplicate_key", "invalid_json", "row_not_object"]


# --- long conversations


def test_long_conversations_are_split_between_turns_and_lose_no_message(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat(0, turns=40, words=20), chat(1)])
    packing = pack_files([path], MINI, settings(on_long="split"))
    assert packing.failures == ()
    parts = [each for row in packing.rows for each in row if each.place.line == 1]
    assert sorted(each.place.part for each in parts) == list(range(len(parts)))
    assert len(parts) > 2
    whole = []
    for part in sorted(parts, key=lambda each: each.place.part):
        messages = json.loads(f"[{part.json}]")
        assert messages[0] == {"role": "system", "content": "s0"}
        assert messages[-1]["role"] == "assistant"
        assert part.padded <= 256
        whole += messages[1:]
    assert whole == chat(0, turns=40, words=20)[1:]
    assert packing.counts()["parts_split_off_at_a_turn"] == len(parts) - 1


def test_an_answer_that_no_row_holds_is_refused_whole(tmp_path):
    path = write(tmp_path / "a.jsonl", [[*chat(0, turns=3), *chat(0, words=400)[1:]], chat(1)])
    packing = pack_files([path], MINI, settings(on_long="split"))
    assert [(each.kind, each.place.line) for each in packing.failures] == [("too_long", 1)]
    assert len(packing.rows) == 1


# --- processes and kills


@pytest.mark.usefixtures("small_chunks")
def test_any_number_of_processes_writes_the_same_bytes(tmp_path):
    written = []
    for processes in (1, 2, 3):
        packing = pack_files([CHAT], MINI, settings(), processes=processes)
        out = tmp_path / "out.packed"
        written.append([path.read_bytes() for path in write_rows(packing, out)])
    assert written[0] == written[1] == written[2]
    assert written[0][0].count(b"\n") > 5


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of the fork, whose child only packs
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_packing_killed_between_chunks_leaves_no_file_and_goes_on(tmp_path, monkeypatch, chunk):
    path = write(tmp_path / "in.jsonl", [chat(index) for index in range(50)])
    whole = packed_lines(pack_files([path], MINI, settings()))
    out = tmp_path / "out.packed"
    _die_at(chunk, path, out)
    assert not out.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [work_folder(out).name, "in.jsonl"]
    measured = []
    monkeypatch.setattr(Spool, "add", _counting(measured, Spool.add))
    assert run(path, "--out", out, "--resume") == 0
    assert len(measured) == 7 - chunk
    assert out.read_bytes() == b"".join(whole)
    assert not work_folder(out).exists()


def _die_at(chunk, path, out):
    """Pack in a child that is killed when it has kept `chunk` chunks and half of the next one's records."""
    pid = os.fork()
    if not pid:
        try:
            add = Spool.add

            def kill(self, each):
                if self.chunks == chunk:
                    self._records.write(each.records[:5])
                    self._records.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                add(self, each)

            Spool.add = kill
            run(path, "--out", out)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def _counting(measured, add):
    def count(self, chunk):
        measured.append(chunk)
        add(self, chunk)

    return count


@pytest.mark.usefixtures("small_chunks")
def test_a_journal_cut_or_changed_anywhere_costs_measuring_and_never_a_row(tmp_path):
    path = write(tmp_path / "in.jsonl", [chat(index) for index in range(50)])
    whole = packed_lines(pack_files([path], MINI, settings()))
    work = tmp_path / "work"
    pack_files([path], MINI, settings(), work=work).spool.close()
    journal, records = (work / "journal").read_bytes(), (work / "records").read_bytes()
    for at in (0, 3, 20, len(journal) // 2, len(journal) - 1):
        flipped = bytearray(journal)
        flipped[at] ^= 1
        for damaged in (journal[:at], bytes(flipped)):
            (work / "journal").write_bytes(damaged)
            (work / "records").write_bytes(records)
            packing = pack_files([path], MINI, settings(), work=work, resume=True)
            assert packed_lines(packing) == whole, at
            packing.spool.close()


@pytest.mark.parametrize("resume", [True, False])
def test_what_depends_on_other_inputs_is_neither_gone_on_with_nor_thrown_away_unasked(tmp_path, resume):
    path = write(tmp_path / "in.jsonl", [chat(0)])
    work = tmp_path / "work"
    pack_files([path], MINI, settings(), work=work).spool.close()
    kept = {each.name: each.read_bytes() for each in work.iterdir()}
    length = r"had pack_length 256 \(now 128\)\. .* begin anew by --restart"
    with pytest.raises(PackproofError, match=length):
        pack_files([path], MINI, settings(pack_length=128), work=work, resume=resume)
    write(path, [chat(0), chat(1)])
    with pytest.raises(PackproofError, match=r"had other inputs, or inputs that changed\. .* by --restart"):
        pack_files([path], MINI, settings(), work=work, resume=resume)
    (work / "key.json").write_bytes(kept["key.json"][:-9])
    with pytest.raises(PackproofError, match=r"had options that cannot be read any more .* by --restart"):
        pack_files([path], MINI, settings(), work=work, resume=resume)
    (work / "key.json").write_bytes(kept["key.json"])
    assert {each.name: each.read_bytes() for each in work.iterdir()} == kept
    assert len(pack_files([path], MINI, settings(), work=work, restart=True).spool) == 2


def test_what_another_version_measured_is_not_thrown_away_unasked(tmp_path, monkeypatch):
    path = write(tmp_path / "in.jsonl", [chat(0)])
    work = tmp_path / "work"
    pack_files([path], MINI, settings(), work=work).spool.close()
    monkeypatch.setattr(packing, "_VERSION", 0)
    with pytest.raises(PackproofError, match=r"had another version of packproof\. .* by --restart"):
        pack_files([path], MINI, settings(), work=work)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of the fork, whose child only packs
@pytest.mark.usefixtures("small_chunks")
def test_what_a_killed_packing_measured_is_not_thrown_away_unasked(tmp_path, capsys):
    path = write(tmp_path / "in.jsonl", [chat(index) for index in range(50)])
    out = tmp_path / "out.packed"
    _die_at(2, path, out)
    kept = (work_folder(out) / "records").read_bytes()
    assert run(path, "--out", out) == 2
    said = capsys.readouterr().err
    assert "packproof pack: " in said
    assert "16 conversations measured. To fix it: go on with it by --resume, or throw it away" in said
    assert (work_folder(out) / "records").read_bytes() == kept
    assert run(path, "--out", out, "--resume", "--restart") == 2
    assert "give --resume to go on, or --restart" in capsys.readouterr().err
    assert run(path, "--out", out, "--resume") == 0
    assert "resumed: 16 conversations measured before are used again" in capsys.readouterr().out
    _die_at(1, path, other := tmp_path / "other.packed")
    assert run(path, "--out", other, "--restart") == 0
    assert "resumed" not in capsys.readouterr().out
    assert other.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("end", ["closed", "interrupted"])
def test_standard_input_is_packed_again_since_no_resume_can_read_it_again(tmp_path, monkeypatch, capsys, end):
    lines = b"".join(json.dumps({"messages": chat(index)}).encode() + b"\n" for index in range(3))

    def given():
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))

    out = tmp_path / "out.packed"
    given()
    if end == "closed":
        pack_files([Path("-")], MINI, settings(), work=work_folder(out)).spool.close()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "padded", lambda _: signal.raise_signal(signal.SIGINT))
            assert run("-", "--out", out) == 130
        assert capsys.readouterr().err == "packproof pack: ended by SIGINT; nothing was written\n"
    given()
    assert run("-", "--out", out) == 0
    assert "--resume" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent_and_leave_the_lock(tmp_path, number):
    """The parent is killed while two processes are busy; its lock is free at once, and they are gone."""
    work, pids = tmp_path / "work", tmp_path / "pids"
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tools.ordered_pool import run_in_order\n"
        "from tools.pack_rows.spool import Spool\n"
        "work, pids = map(Path, sys.argv[1:])\n"
        "def task(number):\n"
        "    with pids.open('a') as file: file.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(120)\n"
        "spool = Spool(work, key={}, resume=False)\n"
        "list(run_in_order(task, [0, 1], 2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(work), str(pids)])
    try:
        _until(lambda: pids.is_file() and pids.read_text().count("\n") == 2)
        workers = [int(pid) for pid in pids.read_text().split()]
        held = {str(each.readlink()) for pid in workers for each in Path(f"/proc/{pid}/fd").iterdir()}
        assert str(work / "lock") not in held
    finally:
        parent.send_signal(number)
        parent.wait()
    Spool(work, key={}, resume=True).remove()
    _until(lambda: not any(_runs(pid) for pid in workers))


def _until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_packing_that_is_interrupted_says_that_resume_goes_on(tmp_path, monkeypatch, capsys, number):
    path = write(tmp_path / "in.jsonl", [chat(index) for index in range(50)])
    out = tmp_path / "out.packed"
    add = Spool.add

    def interrupt(self, each):
        add(self, each)
        if self.chunks == 2:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "add", interrupt)
        assert run(path, "--out", out) == 128 + number
    assert capsys.readouterr().err == (
        f"packproof pack: ended by {number.name}; what was measured is kept, and the same command with --resume goes on\n"
    )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert run(path, "--out", out, "--resume") == 0
    assert "resumed: 16 conversations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "helps"),
    [
        (("--on-bad", "skip"), "choose --on-long skip, split or truncate."),
        (("--on-bad", "skip", "--on-long", "split"), "choose --on-long skip or truncate."),
        (
            ("--on-bad", "skip", "--on-long", "split", "--semantics", "strict,lost_conversations=refuse"),
            "choose --on-long skip.",
        ),
    ],
)
def test_only_what_helps_a_question_that_is_too_long_is_advised(tmp_path, capsys, asked, helps):
    messages = [*chat(0)[:1], {"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "yes"}]
    assert run(write(tmp_path / "in.jsonl", [messages]), "--out", tmp_path / "out", *asked) == 1
    listed, summed = capsys.readouterr().err.splitlines()
    assert listed.endswith(helps.rstrip("."))
    assert summed == f"1 conversation is refused, so nothing was written; correct it, or {helps}"


def test_two_packings_into_one_file_do_not_mix(tmp_path):
    path = write(tmp_path / "in.jsonl", [chat(0)])
    first = pack_files([path], MINI, settings(), work=tmp_path / "work")
    with pytest.raises(PackproofError, match="another process is packing"):
        pack_files([path], MINI, settings(), work=tmp_path / "work")
    first.spool.remove()
    pack_files([path], MINI, settings(), work=tmp_path / "work").spool.remove()


# --- nothing is lost


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
_CHATS = st.lists(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=6), min_size=1, max_size=25)


_PACKERS = ["first_fit_decreasing", "concatenative", "modified_first_fit_decreasing", "first_fit_shuffle"]


@hypothesis.settings(max_examples=60)
@hypothesis.given(_CHATS, st.sampled_from(_PACKERS), st.sampled_from([1, 2]), st.sampled_from(["skip", "split", "truncate", "error"]))  # fmt: skip
def test_pack_read_and_unpack_give_every_conversation_back(tmp_path_factory, chats, algorithm, cp, on_long):
    """Each conversation is in the rows once, whole or in parts that join, or it is refused by its line."""
    folder = tmp_path_factory.mktemp("property")
    messages = [
        [{"role": "system", "content": f"s{line}"}, *({"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True))]
        for line, pairs in enumerate(chats, 1)
    ]  # fmt: skip
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(json.dumps({"messages": each}, ensure_ascii=False).encode() + b"\n" for each in messages))
    asked = settings(pack_length=64, algorithm=algorithm, context_parallel_size=cp, seed=3, on_long=on_long)
    packed = pack_files([path], MINI, asked)
    refused = {each.place.line for each in packed.refused}
    assert not refused or {each.kind for each in packed.refused} != {"too_long"} or on_long != "truncate"
    kept = [each for line, each in enumerate(messages, 1) if line not in refused]
    assert packed.counts()["conversations_refused"] == len(packed.refused) == len(refused)
    hypothesis.event(f"{on_long}: {len(kept)} kept" if len(kept) < 2 else f"{on_long}: several kept")
    if not kept:
        return
    out, _ = write_rows(packed, folder / "out.packed")
    found = unpacked(out)
    if on_long != "split":
        assert Counter(map(json.dumps, found)) == Counter(map(json.dumps, kept))
        return
    parts = {}
    for conversation in found:
        parts.setdefault(conversation[0]["content"], []).append(conversation[1:])
    assert parts.keys() == {each[0]["content"] for each in kept}
    for system, *turns in kept:
        mine = parts[system["content"]]
        hypothesis.event(f"{min(len(mine), 3)} parts")
        assert sum(map(len, mine)) == len(turns)
        assert any(list(itertools.chain(*order)) == turns for order in _orders(mine, turns))


def _orders(parts, turns):
    """Yield the orders of parts that begin as the turns do; parts may be equal, so that one order need not join to all."""
    if not parts:
        yield []
    for index, part in enumerate(parts):
        if turns[: len(part)] == part:
            for rest in _orders(parts[:index] + parts[index + 1 :], turns[len(part) :]):
                yield [part, *rest]
                break
