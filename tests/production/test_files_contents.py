"""Files that are no JSON lines, told by their first bytes, and rows of another shape, named as what they look like (R-FILE-11, R-FILE-12)."""

import gzip
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from production.errors import BadInput
from production.files.head import cut_end, first_rows, stream_lines
from production.files.source import open_source

MESSAGES = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yo"}]
ROWS = [{"messages": MESSAGES}, {"messages": MESSAGES, "id": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = pa.Table.from_pylist([{"messages": MESSAGES}])


def parquet():
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


def arrow(open_writer):
    sink = pa.BufferOutputStream()
    with open_writer(sink, TABLE.schema) as writer:
        writer.write(TABLE)
    return sink.getvalue().to_pybytes()


OTHER = {
    "a Parquet file": (parquet(), "other_format", "from_parquet"),
    "an Arrow file": (arrow(pa.ipc.new_file), "other_format", "from_file"),
    "an Arrow stream": (arrow(pa.ipc.new_stream), "other_format", "from_file"),
    "packed with gzip": (gzip.compress(LINES.encode()), "other_format", "rename it to end in .gz"),
    "packed with Zstandard": (zstandard.compress(LINES.encode()), "other_format", "rename it to end in .zst"),
    "UTF-16 text": (LINES.encode("utf-16"), "bom", "iconv"),
    "UTF-32 text": (LINES.encode("utf-32"), "bom", "iconv"),
    "UTF-16 text without": (LINES.encode("utf-16-be"), "other_format", "iconv"),
    "UTF-16 text without a byte": (LINES.encode("utf-16-le"), "other_format", "iconv"),
    "one JSON array": (json.dumps(ROWS, indent=2).encode(), "json_array", "jq -c"),
    "one JSON array, not": (json.dumps(ROWS).encode(), "json_array", "jq -c"),
    "one JSON array, not JSON": (f"[{LINES.strip().replace(chr(10), ',' + chr(10))}]".encode(), "json_array", "jq -c"),
    "spread over several lines": ("\n".join(json.dumps(row, indent=1) for row in ROWS).encode(), "indented_json", "jq -c"),
    "a Python pickle": (pickle.dumps(ROWS), "other_format", "JSON lines"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "other_format", "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html></html>", "other_format", "download"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER)
def test_a_file_that_is_no_json_lines_is_named_as_what_it_is(tmp_path, what):
    """R-FILE-11."""
    content, kind, fix = OTHER[what]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    for on_bad_row in ("error", "skip"):
        with pytest.raises(BadInput) as caught:
            open_source([file], on_bad_row=on_bad_row)
        assert caught.value.kind == kind
        assert what in caught.value.what
        assert fix in caught.value.fix
        assert caught.value.file == str(file)
    assert list(tmp_path.iterdir()) == [file]  # no index of it was built
    for read in (lambda: list(stream_lines(str(file))), lambda: list(first_rows(str(file), 4, "messages", skip=True))):
        with pytest.raises(BadInput) as again:
            read()
        assert (again.value.kind, again.value.what) == (kind, caught.value.what)


def test_compressed_files_are_recognised_by_their_contents(tmp_path):
    for name, pack in (("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstandard.compress)):
        file = tmp_path / name
        for content, kind in ((json.dumps(ROWS, indent=1).encode(), "json_array"), (parquet(), "other_format")):
            file.write_bytes(pack(content))
            for read in (lambda: open_source([file]), lambda: list(stream_lines(str(file)))):  # noqa: B023
                with pytest.raises(BadInput) as caught:
                    read()
                assert caught.value.kind == kind
        file.write_text(LINES)
        with pytest.raises(BadInput, match="take that ending off its name"):
            open_source([file])
        file.write_bytes(pack(LINES.encode()))
        assert [messages for _, messages in first_rows(str(file), 9, "messages", skip=False)] == [MESSAGES, MESSAGES]
        assert list(stream_lines(str(file))) == [line.encode() for line in LINES.splitlines(keepends=True)]
    (tmp_path / "a.gz").write_bytes(zstandard.compress(LINES.encode()))
    with pytest.raises(BadInput, match="packed with Zstandard, and its name says gzip"):
        open_source([tmp_path / "a.gz"])


@pytest.mark.parametrize(
    ("row", "looks", "fix"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "ShareGPT", "`from` as role"),
        ({"messages": [{"from": "human", "value": "a"}]}, "ShareGPT", "`value` as content"),
        ({"instruction": "a", "input": "", "output": "b"}, "Alpaca", '"content": output'),
        ({"prompt": "a", "completion": "b"}, "pairs of prompt and completion", '"content": completion'),
        ({"conversation": MESSAGES}, "messages stand under 'conversation'", "chat_key: conversation"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", "chosen one"),
        ({"text": "a"}, "plain text for pretraining", "write messages"),
        (MESSAGES, "the bare messages", "around them"),
    ],
)
def test_a_row_of_another_shape_is_named_as_what_it_looks_like(tmp_path, row, looks, fix):
    """R-FILE-12."""
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps(row) + "\n") * 2)
    with pytest.raises(BadInput) as caught:
        open_source([file])[0]
    assert looks in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.line == 1


def test_a_row_that_is_a_list_is_not_taken_for_a_json_array_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("[1, 2]\n" + LINES)
    with open_source([file], on_bad_row="skip") as source:
        assert [bad.kind for bad in source.skipped] == ["row_not_object"]
        assert len(source) == 2


@pytest.mark.parametrize("name", ["a\0b.jsonl", "a\ud800b.jsonl", "x" * 5000, ""])
def test_a_name_that_no_file_can_have_is_a_packproof_error(tmp_path, name):
    for read in (lambda: open_source([str(tmp_path / name)]), lambda: list(stream_lines(str(tmp_path / name)))):
        with pytest.raises(BadInput) as caught:
            read()
        assert caught.value.kind in ("missing_file", "unreadable_file", "not_a_file")
        str(caught.value).encode()  # it can be printed


def test_the_end_of_a_file_is_looked_at_alone(tmp_path):
    """R-FILE-13."""
    file = tmp_path / "rows.jsonl"
    whole = LINES.encode()
    last = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        fault = cut_end(str(file), "messages")
        is_cut = size not in (0, last, len(whole) - 1, len(whole)) and size != last - 1
        assert (fault is not None) == is_cut, size
        assert fault is None or (fault.kind, fault.byte) == ("truncated_last_line", size)


@pytest.mark.parametrize(
    ("name", "pack"), [("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstandard.compress)]
)
def test_an_opened_source_has_the_rows_that_its_manifest_says(tmp_path, name, pack):
    """R-FILE-13."""
    file = tmp_path / name
    file.write_bytes(pack(LINES.encode()))
    for rows in (2, 3):
        (tmp_path / "rows.jsonl.manifest.json").write_text(
            json.dumps({"output": {"rows": rows, "bytes": len(LINES.encode())}})
        )
        with open_source([file]) as source:
            if rows == 2:
                source.check_manifests()
                continue
            with pytest.raises(BadInput, match=r"rows 3, and .* has 2") as caught:
                source.check_manifests()
            assert caught.value.kind == "manifest"
