"""A subject in a process of its own: whatever it does, the rows beside it are built, and no process is left behind."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import packproof_subject
from equivalence.generators import tokenizers
from equivalence.subjects import RowSettings, join_names, load, split_names
from equivalence.subjects.external.packed_rows import build_packed_row
from equivalence.subjects.external.process import GUARD, ChildProcess, SubjectFailed
from equivalence.subjects.external.subject import MOST_FAILURES
from equivalence.subjects.external.tokenizer_folder import portable_folder
from equivalence.subjects.protocol import NotComparable

ADAPTER = Path(__file__).with_name("faulty_adapter.py")
SETTINGS = RowSettings(pack_length=8)


def command(fault):
    return f"{sys.executable} {ADAPTER} {fault}"


@pytest.fixture
def subject():
    """Makes a subject with a fault, and ends it with the test."""
    made = []

    def make(fault):
        made.append(load(f"exec:{command(fault)}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows_of(subject, *, counts=(1, 2, 3, 4, 5)):
    """Ask for a row of so many messages each, in one request."""
    asked = [[{"role": "user", "content": "w1"}] * count for count in counts]
    return subject.build_rows(asked, tokenizers.load("word"), SETTINGS)


def is_row_of(built, count):
    return not isinstance(built, SubjectFailed) and built.input_ids.tolist() == [index + count for index in range(8)]


def is_running(pid):
    """Whether a process is there, and is no zombie that its parent forgot."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(*pids, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(is_running, pids)):
            return
        time.sleep(0.02)
    raise AssertionError(f"{[pid for pid in pids if is_running(pid)]} are left behind")


def test_rows_come_back_with_the_protocols_dtypes_and_prints_are_harmless(subject):
    built = rows_of(subject("none"))
    assert [is_row_of(row, count) for row, count in zip(built, (1, 2, 3, 4, 5), strict=True)] == [True] * 5
    row = built[0]
    dtypes = [row.input_ids.dtype, row.target_ids.dtype, row.token_mask.dtype, row.cu_seqlens.dtype]
    assert dtypes == [torch.int64, torch.int64, torch.float32, torch.int32]
    assert row.max_seqlen == 8


CONVERSATIONS = [{"tokens": [1 << 40, 2, 3], "trained": [False, True, True]}, {"tokens": [], "trained": []}]
SIZES = {"pack_length": 8, "pad_id": 7, "eos_id": -1, "context_parallel_size": 2}


def test_packs_come_back_as_lists_with_the_sizes_that_were_asked_for(subject):
    found = subject("none")
    assert found.pack(CONVERSATIONS, **SIZES) == [
        {"input_ids": [1 << 40, 2, 3], "labels": [8, 7, -1, 2], "mask": [0.0, 1.0, 1.0], "sources": [0]},
        {"input_ids": [], "labels": [8, 7, -1, 2], "mask": [], "sources": [1]},
    ]
    assert found.hello.seams == ("build_row", "pack")
    assert found.hello.conventions == {"shift": "model", "tail": "none"}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", "raised KeyError: 'tokens'"),
        ("hang", "gave no answer within 0.3 s to packs"),
        ("no_list", "pack returned dict: return a list of packs"),
        ("no_dict", "pack must return a dict with input_ids, labels, got list"),
    ],
)
def test_missing_packs_are_reported(subject, fault, told):
    with pytest.raises(SubjectFailed) as failed:
        subject(fault).pack(CONVERSATIONS, **SIZES)
    assert told in str(failed.value)


def test_a_refusal_to_pack_keeps_its_kind_and_words(subject):
    with pytest.raises(packproof_subject.Refused) as refused:
        subject("refuses").pack(CONVERSATIONS, **SIZES)
    assert (refused.value.kind, refused.value.message) == ("truncated", "not mine")


def test_as_many_flags_as_tokens_are_asked_for(subject):
    with pytest.raises(ValueError, match="conversation 0 has 1 tokens and 0 trained flags"):
        subject("none").pack([{"tokens": [1], "trained": []}], **SIZES)


def row_of_packs(packs, *, texts=("w1 w2 w3", "w4 w5"), conventions=None, pack_length=8, semantics="megatron-lm-0.19"):
    """Build a row of the format identity with a packing function that gives these packs; contents are the conversations' tokens."""
    messages = [{"role": "system", "content": text} for text in texts]
    settings = RowSettings(pack_length=pack_length, prompt_format="identity", semantics=semantics)

    def pack(conversations, **sizes):
        assert [each["tokens"] for each in conversations] == [[13, 14, 15], [16, 17]]
        assert all(all(each["trained"]) for each in conversations)
        assert sizes == {"pack_length": pack_length, "pad_id": 0, "eos_id": 2, "context_parallel_size": 1}
        return packs

    return build_packed_row(pack, conventions or {}, messages, tokenizers.load("word"), settings)


UNSHIFTED = {"input_ids": [13, 14, 15, 16, 17], "labels": [13, 14, 15, 16, 17], "cu_seqlens": [0, 3, 5]}


def test_a_pack_is_a_row_once_its_declared_conventions_are_undone():
    declared = {"shift": "model", "row_length": "ragged", "pad_label": "ignore", "tail": "none"}
    row = row_of_packs([UNSHIFTED], conventions=declared)
    assert row.input_ids.tolist() == [13, 14, 15, 16, 17, 0, 0, 0]
    assert row.target_ids.tolist() == [14, 15, 16, 17, 0, 0, 0, 0]
    assert row.token_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert row.cu_seqlens.tolist() == [0, 3, 8]


def test_a_convention_that_is_not_declared_is_named():
    declared = {"row_length": "ragged", "pad_label": "ignore", "tail": "none"}
    with pytest.raises(SubjectFailed, match=r"does not declare: serve\(…, conventions=\{'shift': 'model'\}\)"):
        row_of_packs([UNSHIFTED], conventions=declared)


def test_a_fault_that_no_convention_explains_is_left_to_the_comparison():
    declared = {"shift": "model", "row_length": "ragged", "pad_label": "ignore", "tail": "none"}
    row = row_of_packs([{**UNSHIFTED, "labels": [13, 14, 99, 16, 17]}], conventions=declared)
    assert row.target_ids.tolist()[:4] == [14, 99, 16, 17]


@pytest.mark.parametrize(
    ("packs", "told"),
    [
        ([], "made 0 packs of conversations that fit into one row of 8 tokens"),
        ([UNSHIFTED, UNSHIFTED], "made 2 packs"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels must have the 2 positions of input_ids"),
        ([{"input_ids": [1, 2]}], "lacks labels"),
    ],
)
def test_packs_that_are_no_row_say_why(packs, told):
    with pytest.raises(SubjectFailed, match=told):
        row_of_packs(packs)


def test_rows_that_a_packing_function_builds_differently_by_design_are_not_compared():
    with pytest.raises(NotComparable, match="do not fit into one row"):
        row_of_packs([UNSHIFTED], pack_length=4)
    with pytest.raises(NotComparable, match="the reference refuses the row"):
        row_of_packs([UNSHIFTED], semantics="strict")


def test_an_adapter_is_started_once_for_all_rows_and_again_after_it_is_closed(subject):
    found = subject("counts")
    first, second = (rows_of(found, counts=(1,))[0].input_ids.tolist() for _ in range(2))
    assert (first[0], second[1]) == (second[0], 2)
    found.close()
    assert rows_of(found, counts=(1,))[0].input_ids.tolist() != first
    wait_until_gone(first[0])


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("crash", "ended with exit status 5 while it was asked for row 2 of a request; stderr: "),
        ("killed", "was killed by SIGSEGV"),
        ("hang", "gave no answer within 0.3 s to row 2"),
        (
            "garbage",
            "not a frame of the protocol to its stdout when it was asked for row 2 of a request: b'epoch 1/3 loss",
        ),
        ("closes_stdout", "closed its stdout while it was asked for row 2"),
        ("raises", "raised KeyError: 'role' (at "),
    ],
)
def test_a_row_that_fails_costs_the_rows_beside_it_nothing(subject, fault, told):
    built = rows_of(subject(fault))
    assert [is_row_of(built[at], at + 1) for at in (0, 1, 3, 4)] == [True] * 4
    assert isinstance(built[2], SubjectFailed)
    assert told in str(built[2])


def test_the_last_lines_of_stderr_are_reported_with_a_crash(subject):
    assert str(rows_of(subject("crash"))[2]).endswith("| about to end")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("shape", "gave input_ids of shape (1, 8)"),
        ("nan", "gave input_ids with NaN or infinity"),
        ("words", "raised TypeError: input_ids must hold numbers only"),
        ("ragged", "raised TypeError: input_ids is a list of lists of several lengths"),
        ("keys", "has unknown keys labels and lacks target_ids"),
        ("list", "raised TypeError: build_row must return a dict with input_ids"),
    ],
)
def test_an_answer_that_is_not_a_row_fails_alone_and_names_the_reason(subject, fault, told):
    found = subject(fault)
    (built,) = rows_of(found, counts=(1,))
    assert told in str(built)
    assert isinstance(built, SubjectFailed)
    assert len(rows_of(found)) == 5


@pytest.mark.parametrize(("fault", "dtype", "length"), [("short", torch.int64, 7), ("fractions", torch.float64, 8)])
def test_a_length_or_a_dtype_that_is_wrong_is_left_to_the_comparison(subject, fault, dtype, length):
    (built,) = rows_of(subject(fault), counts=(1,))
    assert (built.input_ids.dtype, len(built.input_ids)) == (dtype, length)


def test_a_flood_of_stderr_blocks_nothing_and_is_not_kept(subject):
    found = subject("flood")
    assert is_row_of(rows_of(found, counts=(1,))[0], 1)
    assert len(found._child._tail) <= 4096


def test_a_slow_adapter_is_waited_for(subject):
    assert is_row_of(rows_of(subject("slow"), counts=(1,))[0], 1)


@pytest.mark.parametrize(("fault", "kind"), [("refuses", "role_order"), ("maps", "truncated")])
def test_a_refusal_is_a_result_by_its_kind(subject, fault, kind):
    (built,) = rows_of(subject(fault), counts=(1,))
    assert built.refusal.kind == kind
    assert built.refusal.message in ("not mine", "ValueError: the row is too long for me")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "crash_at_start",
            "ended with exit status 3 while it was asked for its first frame; stderr: no module named nothing",
        ),
        ("no_serve", "ended with exit status 0"),
        ("protocol", "speaks protocol 99 and packproof speaks 1"),
        ("name", "calls itself 'production'"),
    ],
)
def test_an_adapter_that_cannot_start_is_reported_before_anything_runs(fault, told):
    with pytest.raises(ValueError, match=r"(?s).*") as raised:
        load(f"exec:{command(fault)}")
    assert told in str(raised.value)


def test_an_adapter_that_hangs_at_its_start_is_given_up(monkeypatch):
    monkeypatch.setenv("PACKPROOF_SUBJECT_SECONDS", "0.2")
    with pytest.raises(ValueError, match=r"gave no answer within 0\.2 s to its first frame"):
        load(f"exec:{command('hang_at_start')}")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exec:", "names no command"),
        ("exec:python 'my.py", "close its quotes"),
        ("exec:no_such_program_here x.py", "no_such_program_here: No such file or directory"),
    ],
)
def test_an_invalid_command_is_reported(name, told):
    with pytest.raises(ValueError, match=told):
        load(name)


def test_output_that_an_import_prints_before_serve_is_ignored(subject):
    assert is_row_of(rows_of(subject("noise_at_start"), counts=(1,))[0], 1)


def test_a_subject_that_fails_too_often_is_started_no_more_and_its_rows_are_left_out(subject):
    found = subject("crash")
    assert found.covers(SETTINGS)
    built = rows_of(found, counts=(3,) * (MOST_FAILURES + 2))
    assert "ended with exit status 5" in str(built[MOST_FAILURES - 1])
    assert "failed 8 times in this process and is not started again" in str(built[MOST_FAILURES])
    assert not found.covers(SETTINGS)


def test_settings_that_an_adapter_does_not_take_are_not_asked_of_it(subject):
    found = subject("strict_only")
    assert found.covers(SETTINGS.replace(semantics="strict"))
    assert not found.covers(SETTINGS)


def test_processes_that_an_adapter_forked_end_with_the_adapter(subject):
    found = subject("grandchild")
    pids = rows_of(found, counts=(1,))[0].input_ids.tolist()
    assert all(map(is_running, pids))
    found.close()
    wait_until_gone(*pids)


def test_a_crash_leaves_no_grandchild_behind(subject):
    found = subject("grandchild")
    child, sleeper = rows_of(found, counts=(1,))[0].input_ids.tolist()
    os.kill(child, signal.SIGKILL)
    wait_until_gone(child, sleeper)


def test_no_process_is_left_behind_where_packproof_is_killed():
    """The process that started the adapter is killed: guard, adapter and grandchild end, though nobody told them to."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = ChildProcess([sys.executable, str(ADAPTER), "grandchild"])
        child.receive(20, what="hello")
        row = {"id": 0, "messages": [], "tokenizer": "", "settings": {"pack_length": 8}}
        child.send(packproof_subject.frame_bytes({"type": "build_row", "rows": [row]}))
        _header, body = child.receive(20, what="row")
        pids = torch.frombuffer(body, dtype=torch.int64, count=2).tolist()
        os.write(write, repr([child._process.pid, *pids]).encode())
        time.sleep(1000)
        os._exit(0)
    pids = ast.literal_eval(os.read(read, 4096).decode())
    os.close(read)
    os.close(write)
    assert all(map(is_running, pids))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until_gone(*pids)


def test_a_forked_worker_starts_its_own_adapter_and_leaves_its_parents_alone(subject):
    found = subject("counts")
    (before,) = rows_of(found, counts=(1,))
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        (row,) = rows_of(found, counts=(1,))
        os.write(write, repr(row.input_ids.tolist()).encode())
        found.close()
        os._exit(0)
    os.waitpid(worker, 0)
    pid, answered = ast.literal_eval(os.read(read, 4096).decode())
    os.close(read)
    os.close(write)
    (after,) = rows_of(found, counts=(1,))
    assert answered == 1
    assert pid != before.input_ids[0]
    assert after.input_ids.tolist() == [int(before.input_ids[0]), 2]
    wait_until_gone(pid)


def test_an_adapter_that_never_reads_its_stdin_ends_with_packproof():
    child = ChildProcess([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"])
    while not child._incoming:
        child._pump(1.0)
    guard = child._process.pid
    (adapter,) = map(int, Path(f"/proc/{guard}/task/{guard}/children").read_text().split())
    child._close_pipes()  # as if packproof were gone
    child._process.wait()
    wait_until_gone(adapter)


def test_a_forked_process_that_lives_on_holds_no_pipe_of_its_parents_adapter(subject):
    found = subject("counts")
    pid = int(rows_of(found, counts=(1,))[0].input_ids[0])
    idle = os.fork()
    if idle == 0:
        time.sleep(1000)
        os._exit(0)
    try:
        found._child._close_pipes()
        found._child._process.wait()
        wait_until_gone(pid, seconds=4)
    finally:
        os.kill(idle, signal.SIGKILL)
        os.waitpid(idle, 0)


def test_the_guard_gives_an_adapter_time_to_end_by_itself(tmp_path):
    """Closing stdin is no kill: what an adapter does at its end, such as writing a file, is done."""
    script = "import pathlib, sys, time; sys.stdin.read(); time.sleep(0.2); pathlib.Path('done').touch()"
    subprocess.run(
        [sys.executable, str(GUARD), sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.DEVNULL, check=True
    )
    assert (tmp_path / "done").exists()


def test_names_are_split_at_commas_outside_quotes():
    text = """reference, exec:"python my.py --a b,c" ,exec:python other.py,exec:'p "x,y" z',m:Object"""
    names = ("reference", "exec:python my.py --a b,c", "exec:python other.py", 'exec:p "x,y" z', "m:Object")
    assert split_names(text) == names
    assert split_names(join_names(names)) == names
    assert split_names('exec:"/a b/python" my.py') == ('exec:"/a b/python" my.py',)


def test_a_tokenizer_folder_for_another_environment_names_a_class_of_transformers_4(tmp_path, monkeypatch):
    import json

    from transformers import AutoTokenizer

    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path))
    tokenizer = tokenizers.load("plain-template")
    folder = portable_folder(tokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"] == tokenizer.chat_template
    again = AutoTokenizer.from_pretrained(str(folder))
    assert again("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]
    assert portable_folder(tokenizers.load("nemotron-mini")) == tokenizers.folder("nemotron-mini")


def test_the_file_that_is_copied_alone_is_python_3_8_and_needs_the_standard_library():
    path = Path(__file__).resolve().parents[2] / "subject" / "packproof_subject.py"
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= sys.stdlib_module_names
