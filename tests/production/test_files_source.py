"""R-FILE, whole files: rows by number, faults with file, line and byte, skipping, packed files, workers, changes underfoot."""

import gzip
import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from production.errors import BadInput
from production.files import compressed, lines, source
from production.files.source import open_source


def row(number, **more):
    return {"messages": [{"role": "user", "content": f"row {number} é\u2028\x85"}], **more}


def line(number):
    return json.dumps(row(number), ensure_ascii=False).encode() + b"\n"


GOOD = [line(number) for number in range(5)]
BAD = [
    (b"{}\n", "missing_chat_key", 0),
    (b"\n", "blank_line", 0),
    (b'{"messages": [{"role": "u", "content": null}]}\n', "content_null", 39),
    (b'{"messages": [{"role": "u", "content": "\xff"}]}\n', "invalid_utf8", 40),
]


@pytest.fixture
def write(tmp_path):
    def write(data, name="rows.jsonl.packed"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def fault_of(action):
    with pytest.raises(BadInput) as caught:
        action()
    error = caught.value
    assert all((error.what, error.where, error.fix))
    assert str(error).startswith(error.file)
    return error


def opening(path, **settings):
    return fault_of(lambda: open_source(path, **settings))


def test_rows_by_number_and_in_order(write):
    path = write(b"".join(GOOD))
    found = open_source(path)
    assert len(found) == 5
    assert list(found) == [found[i] for i in range(5)] == [row(i)["messages"] for i in range(5)]
    assert found[-1] == found[np.int64(4)] == found[4]
    assert [found.raw(i) for i in range(5)] == GOOD
    for i in (5, -6):
        with pytest.raises(IndexError):
            found[i]
    start = len(GOOD[0])
    assert found.locate(1) == (str(path), 2, start, start + len(GOOD[1]))
    assert path.read_bytes()[found.locate(3).byte_start : found.locate(3).byte_end] == GOOD[3]


def test_r_file_6_every_key_of_a_message_is_kept_and_the_chat_key_is_free(write):
    message = {"role": "tool", "content": "", "tool_calls": [{"id": 1.5, "x": {"role": None}}], "name": "né"}
    path = write(json.dumps({"conversations": [message], "messages": 3}).encode())
    assert open_source(path, chat_key="conversations")[0] == [message]
    assert fault_of(lambda: open_source(path)[0]).kind == "row_not_list"


def test_several_files_are_one_after_another(write):
    paths = [write(b"".join(GOOD[:2]), "a.jsonl"), write(GOOD[2], "b.jsonl"), write(b"".join(GOOD[3:]), "c.jsonl")]
    found = open_source(paths)
    assert list(found) == [found[i] for i in range(5)] == [row(i)["messages"] for i in range(5)]
    assert [Path(found.locate(i).file).name[0] for i in range(5)] == list("aabcc")
    assert [found.locate(i).line for i in range(5)] == [1, 2, 1, 1, 2]


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize(("bad", "kind", "byte"), BAD)
def test_r_file_6_a_fault_says_file_line_and_byte(write, at, bad, kind, byte):
    path = write(b"".join([*GOOD[:at], bad, *GOOD[at:]]))
    found = open_source(path)
    expected = (kind, str(path), at + 1, sum(map(len, GOOD[:at])) + byte)
    error = fault_of(lambda: found[at])
    assert (error.kind, error.file, error.line, error.byte) == expected
    assert str(error.byte) in str(error)
    assert str(fault_of(lambda: list(found))) == str(fault_of(found.validate)) == str(error)
    assert [str(fault) for fault in found.faults()] == [str(error)]
    assert [found[i] for i in range(6) if i != at] == [row(i)["messages"] for i in range(5)]


def test_the_fault_of_a_later_file_counts_in_that_file(write):
    found = open_source([write(GOOD[0], "a.jsonl"), write(GOOD[1] + b"[]\n", "b.jsonl.zst.jsonl")])
    error = fault_of(lambda: found[2])
    assert (error.kind, Path(error.file).name, error.line, error.byte) == (
        "row_not_object",
        "b.jsonl.zst.jsonl",
        2,
        len(GOOD[1]),
    )


def test_r_file_2_the_last_line(write):
    assert open_source(write(GOOD[0] + GOOD[1].rstrip(), "whole.jsonl"))[1] == row(1)["messages"]
    path = write(GOOD[0] + GOOD[1][:-9], "cut.jsonl")
    error = fault_of(lambda: open_source(path)[1])
    assert (error.kind, error.line, error.byte) == ("truncated_last_line", 2, path.stat().st_size)
    error = fault_of(lambda: open_source(write(GOOD[0] + b"\n", "blank.jsonl"))[1])
    assert (error.kind, error.line, error.byte) == ("blank_line", 2, len(GOOD[0]))
    error = fault_of(lambda: open_source(write(GOOD[0][:20] + b"\n", "ended.jsonl"))[0])
    assert (error.kind, error.byte) == ("invalid_json", 20)


def test_r_file_1_a_byte_order_mark_and_windows_line_ends(write):
    error = fault_of(lambda: open_source(write(b"\xef\xbb\xbf" + GOOD[0], "bom.jsonl"))[0])
    assert (error.kind, error.line, error.byte) == ("bom", 1, 0)
    error = fault_of(lambda: open_source(write('{"messages": []}\n{}\n'.encode("utf-16"), "wide.jsonl"))[0])
    assert (error.kind, error.line, error.byte) == ("bom", 1, 0)
    found = open_source(write(b"".join(GOOD).replace(b"\n", b"\r\n"), "crlf.jsonl"))
    assert list(found) == [row(i)["messages"] for i in range(5)]


def test_files_that_cannot_be_opened(write, tmp_path, monkeypatch):
    error = opening(write(b"", "empty.jsonl"))
    assert (error.kind, error.line, error.byte) == ("empty_file", 1, 0)
    assert opening([]).kind == "no_files"
    error = opening(tmp_path / "none.jsonl")
    assert (error.kind, error.line, error.byte) == ("missing_file", None, None)
    assert opening(tmp_path / "rows.jsonl" / "below").kind == "missing_file"
    assert opening(write(GOOD[0], "a.jsonl") / "below").kind == "missing_file"
    assert opening(tmp_path).kind == "not_a_file"
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert opening(tmp_path / "pipe.jsonl").kind == "not_a_file"
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere")
    assert "link" in opening(tmp_path / "link.jsonl").what
    path = write(GOOD[0])
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert opening(path).kind == "unreadable_file"


def test_a_symbolic_link_is_a_file(write, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(write(b"".join(GOOD)))
    assert open_source(tmp_path / "link.jsonl")[4] == row(4)["messages"]


def test_r_file_7_a_line_that_is_too_long_is_refused_unread(write, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(lines, "_READ_BYTES", 150)
    path = write(GOOD[0] + b"[" * 300 + b"\n" + GOOD[1])
    found = open_source(path, on_bad_row="skip")
    assert found.skipped == [(str(path), 2, len(GOOD[0]) + 200, "line_too_long")]
    assert fault_of(lambda: open_source(path)[1]).byte == len(GOOD[0]) + 200
    assert found[1] == row(1)["messages"]


def mixed():
    return [GOOD[0], BAD[0][0], BAD[1][0], GOOD[1], GOOD[2], BAD[2][0], GOOD[3], GOOD[4], BAD[3][0]]


def test_r_file_8_skipping_counts_and_lists_and_numbers_the_rest(write, monkeypatch):
    path = write(b"".join(mixed()))
    starts = [sum(map(len, mixed()[:at])) for at in range(9)]
    expected = [
        (str(path), at + 1, starts[at] + byte, kind) for at, (_, kind, byte) in zip((1, 2, 5, 8), BAD, strict=True)
    ]
    found = open_source(path, on_bad_row="skip")
    assert found.skipped == expected
    assert len(found) == 5
    assert found.describe()["skipped"] == 4
    assert list(found) == [found[i] for i in range(5)] == [row(i)["messages"] for i in range(5)]
    assert [found.locate(i).line for i in range(5)] == [1, 4, 5, 7, 8]
    assert [fault.kind for fault in found.faults()] == [kind for _, kind, _ in BAD]
    found.validate()
    # Opened again, it does not look at the rows again ...
    monkeypatch.setattr(source, "parse_record", None)
    assert open_source(path, on_bad_row="skip").skipped == expected
    # ... but does for another key, or when the file is another.
    for again in (
        lambda: open_source(path, on_bad_row="skip", chat_key="x"),
        lambda: (write(GOOD[0] + b"\n"), open_source(path, on_bad_row="skip")),
    ):
        with pytest.raises(TypeError, match="NoneType"):
            again()


def test_verdicts_that_are_damaged_are_found_again(write, tmp_path):
    path = write(b"".join(mixed()))
    expected = open_source(path, on_bad_row="skip").skipped
    (verdicts,) = tmp_path.glob(".*.bad")
    whole = verdicts.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"content_null", b"content_nulk"), b"\0" * len(whole)):
        verdicts.write_bytes(damaged)
        assert open_source(path, on_bad_row="skip").skipped == expected
        assert verdicts.read_bytes() == whole


def test_r_file_8_skipping_everything_is_an_error(write):
    error = opening(write(GOOD[0][:-1] + b"x\n\n"), on_bad_row="skip")
    assert (error.kind, error.line) == ("no_rows_left", 1)
    with pytest.raises(ValueError, match="on_bad_row"):
        open_source(write(GOOD[0]), on_bad_row="ignore")


def zst(*parts):
    return b"".join(
        zstandard.ZstdCompressor(write_checksum=True, write_content_size=index % 2 == 0).compress(part)
        for index, part in enumerate(parts)
    )


def gz(*parts):
    return b"".join(gzip.compress(part) for part in parts)


PACKERS = [("rows.jsonl.gz", gz), ("rows.jsonl.packed.zst", zst)]


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_r_file_9_packed_files_read_like_plain_ones(write, name, pack):
    data = b"".join(mixed())
    plain = open_source(write(data), on_bad_row="skip")
    for content in (pack(data), pack(data[:50], data[50:]), pack(b"", data, b"")):
        path = write(content, name)
        found = open_source(path, on_bad_row="skip")
        assert list(found) == [found[i] for i in range(5)] == list(plain)
        assert [skip[1:] for skip in found.skipped] == [skip[1:] for skip in plain.skipped]
        assert found.locate(3) == (str(path), *plain.locate(3)[1:])
        assert found.fingerprint == plain.fingerprint
        assert not open_source(path).describe()["files"][0]["index_built_now"]


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_packed_files_that_are_cut_damaged_or_empty(write, tmp_path, name, pack):
    data = os.urandom(400_000).hex().encode().replace(b"0", b"\n")
    whole = pack(data)
    for end in (1, 5, len(whole) // 2, len(whole) - 1):
        error = opening(write(whole[:end], name))
        assert error.kind == "truncated_compressed"
        assert 0 <= error.byte <= len(data)
        assert error.line == data[: error.byte].count(b"\n") + 1
    assert error.byte > 100_000
    middle = len(whole) // 2
    error = opening(write(whole[:middle] + bytes(64) + whole[middle + 64 :], name))
    assert error.kind == "corrupt_compressed"
    assert 1 < error.line <= error.byte <= len(data)
    assert opening(write(GOOD[0], name)).kind == "corrupt_compressed"
    assert opening(write(whole + b"garbage", name)).kind == "corrupt_compressed"
    for content in (b"", pack(b"")):
        error = opening(write(content, name))
        assert (error.kind, error.line, error.byte) == ("empty_file", 1, 0)
    assert not list(tmp_path.glob(".*.tmp"))


def test_zeros_behind_a_gzip_file_are_padding(write):
    whole = gz(b"".join(GOOD[:2])) + bytes(5) + gz(b"".join(GOOD[2:])) + bytes(3000)
    assert list(open_source(write(whole, "rows.jsonl.gz"))) == [row(i)["messages"] for i in range(5)]
    assert opening(write(bytes(5) + whole, "rows.jsonl.gz")).kind == "corrupt_compressed"


def test_a_full_disk_at_unpacking_is_reported_and_leaves_no_file(write, tmp_path, monkeypatch):
    path = write(gz(b"".join(GOOD)), "rows.jsonl.gz")
    monkeypatch.setattr(compressed.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert opening(path).kind == "no_space"
    monkeypatch.undo()
    free = iter([10**9, 10**9])
    monkeypatch.setattr(compressed, "_CHECK_SPACE_BYTES", 100)
    monkeypatch.setattr(compressed.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free, 0)))
    monkeypatch.setattr(compressed, "_CHUNK_BYTES", 64)
    assert opening(path).kind == "no_space"
    assert [found.name for found in tmp_path.iterdir()] == ["rows.jsonl.gz"]


def test_a_removed_or_changed_copy_is_unpacked_again(write):
    path = write(gz(b"".join(GOOD)), "rows.jsonl.gz")
    copy = Path(open_source(path).describe()["files"][0]["unpacked_copy"])
    for harm in (copy.unlink, lambda: copy.write_bytes(copy.read_bytes().replace(b"row", b"raw"))):
        harm()
        assert list(open_source(path)) == [row(i)["messages"] for i in range(5)]


def test_the_copy_is_made_again_for_a_worker_and_must_not_change_underfoot(write):
    path = write(gz(b"".join(GOOD)), "rows.jsonl.gz")
    found = open_source(path)
    copy = Path(found.describe()["files"][0]["unpacked_copy"])
    assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns
    worker = pickle.loads(pickle.dumps(found))
    copy.unlink()
    assert worker[2] == row(2)["messages"]
    assert copy.exists()
    copy.write_bytes(copy.read_bytes())
    os.utime(copy, ns=(5, 5))
    assert fault_of(lambda: worker[2]).kind == "file_changed"


def read_in_worker(found, numbers):
    return [found[i] for i in numbers], os.getpid()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_read_the_same(write, tmp_path, method, monkeypatch):
    write(b"".join(mixed()))
    monkeypatch.chdir(tmp_path)
    found = open_source("rows.jsonl.packed", on_bad_row="skip", cache_folder="cache")
    assert found[0] == row(0)["messages"]
    monkeypatch.chdir("/")
    if method == "fork":
        # Not through a pool: the source itself crosses, with its open files.
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writer, json.dumps([found[i] for i in range(5)]).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert json.loads(os.read(reader, 1 << 16)) == list(found)
        return
    with multiprocessing.get_context(method).Pool(1) as pool:
        rows, process = pool.apply(read_in_worker, (found, range(5)))
    assert process != os.getpid()
    assert rows == [row(i)["messages"] for i in range(5)] == list(found)


def test_threads_share_one_source(write):
    found = open_source(write(b"".join(line(i) for i in range(300))))
    found.close()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(found.__getitem__, range(300))) == [row(i)["messages"] for i in range(300)]
    found.close()


@pytest.mark.parametrize("change", ["append", "touch", "cut", "replace", "remove"])
def test_r_file_5_a_file_that_changes_underfoot_raises(write, change):
    path = write(b"".join(GOOD))
    found, late = open_source(path), pickle.loads(pickle.dumps(open_source(path)))
    assert found[4]
    if change == "append":
        path.write_bytes(path.read_bytes() + GOOD[0])
    elif change == "touch":
        os.utime(path, ns=(0, 0))
    elif change == "cut":
        os.truncate(path, 100)
    elif change == "replace":
        other = write(b"".join(GOOD[::-1]), "other")
        os.utime(other, ns=(5, 5))
        other.replace(path)
    else:
        path.unlink()
    for one in (found, late):
        error = fault_of(lambda one=one: one[4])
        assert error.kind == ("missing_file" if change == "remove" and one is late else "file_changed")
        assert fault_of(lambda one=one: list(one)).kind == error.kind
    if change in {"append", "touch", "replace"}:
        assert len(open_source(path)) == 5 + (change == "append")


def test_progress_goes_up_to_the_whole(write, monkeypatch):
    monkeypatch.setattr(source, "_PROGRESS_BYTES", 100)
    paths = [write(b"".join(GOOD), "a.jsonl"), write(b"".join(GOOD), "b.jsonl")]
    seen = []
    open_source(paths).validate(lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in paths)
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)
    assert len(seen) > 4


def test_r_file_10_the_fingerprint_is_of_the_rows(write, tmp_path):
    path = write(b"".join(GOOD))
    first = open_source(path).fingerprint
    other = write(b"".join(GOOD), "other.jsonl")
    os.utime(other, ns=(7, 7))
    assert open_source(other).fingerprint == first
    assert len(first) == 32
    changed = [
        open_source([path, other]).fingerprint,
        open_source(path, chat_key="m").fingerprint,
        open_source(path, on_bad_row="skip").fingerprint,
        open_source(write(b"".join(GOOD[::-1]), "c.jsonl")).fingerprint,
        first,
    ]
    assert len(set(changed)) == 5
    json.dumps(open_source([path, other], cache_folder=tmp_path / "c").describe())


def test_errors_cross_processes(write):
    error = fault_of(lambda: open_source(write(b"{}\n"))[0])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (BadInput, str(error), error.__dict__)


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
many = st.lists(
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": contents, "content": contents}), min_size=1, max_size=2)}
    ),
    min_size=1,
    max_size=6,
)


@given(rows=many, ascii_only=st.booleans(), ended=st.booleans(), read=st.integers(1, 200))
@settings(deadline=None, max_examples=60)
def test_written_rows_are_read_back_unchanged(tmp_path_factory, rows, ascii_only, ended, read):
    path = tmp_path_factory.mktemp("written") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r, ensure_ascii=ascii_only) for r in rows) + "\n" * ended, "utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch, open_source(path) as found:
        patch.setattr(lines, "_READ_BYTES", read)
        patch.setattr(lines, "_OFFSETS_AT_A_TIME", 1 + read % 4)
        expected = [r["messages"] for r in rows]
        assert list(found) == [found[i] for i in range(len(found))] == expected
