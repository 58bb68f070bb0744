"""R-FILE in the main job: drawn files by production's reader and the reference's, and that every fault of the reader is found."""

import gzip

import pytest
import zstandard

from equivalence.checks.input import packed_files
from equivalence.checks.input.packed_files import check_packed_files
from equivalence.generators.choices import RandomChoices
from equivalence.generators.files import ACTS, BAD, FileDraft, FilesCase, draw_files
from equivalence.runner.layout_jobs import draw_layouts
from reference.files import LineRefused, lines_of, read_lines, read_row, rows_of


def case(*runs, packing="", missing=0, skip=False, acts=(), cuts=(), zeros=0):
    file = FileDraft(runs=runs, missing=missing, packing=packing, cuts=cuts, zeros=zeros)
    return FilesCase(files=(file,), skip=skip, acts=acts, seed=1)


def test_r_file_1_and_2_the_reference_splits_at_newlines_alone():
    assert lines_of("a\u2028b\x85c\rd\n\ne".encode()) == ["a\u2028b\x85c\rd\n".encode(), b"\n", b"e"]
    assert lines_of(b"") == []
    assert lines_of(b"a\n") == [b"a\n"]


@pytest.mark.parametrize(("line", "kind", "at"), BAD, ids=range(len(BAD)))
def test_r_file_6_and_7_the_reference_names_each_fault_as_the_generator_does(line, kind, at):
    with pytest.raises(LineRefused) as refused:
        read_row(line, "messages")
    assert refused.value.kind == kind
    assert 0 <= at < len(line)


def test_r_file_8_the_reference_numbers_rows_without_gaps():
    good = b'{"messages": [{"role": "user", "content": "a"}]}\n'
    lines = read_lines([b"[]\n" + good, good + b"{}\n" + good], "messages")
    assert [(line.file, line.line, line.start) for line in rows_of(lines, skip=True)] == [
        (0, 2, 3),
        (1, 1, 0),
        (1, 3, 52),
    ]
    assert [line.fault for line in rows_of(lines, skip=False)] == [
        "row_not_object",
        None,
        None,
        "missing_chat_key",
        None,
    ]


def test_r_file_2_a_last_line_that_ends_early_is_truncated_also_within_a_letter():
    for content, kind in (
        (b'{"messages": [{"role": "us', "truncated_last_line"),
        ('{"é'.encode()[:-1], "truncated_last_line"),
        (b'{"messages": x', "invalid_json"),
    ):
        with pytest.raises(LineRefused, match=kind):
            read_row(content, "messages")


@pytest.mark.parametrize("number", range(1, len(BAD) + 1), ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(BAD)])
def test_r_file_6_both_sides_name_each_fault_of_the_generator_alike(number):
    assert check_packed_files(case((1, 70), (1, -number), (1, 70))).findings == []


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_file_is_the_same_however_it_is_packed_and_whatever_happens_to_it(packing):
    one = case((3, 70), (1, -3), (2, 5000), packing=packing, skip=True, acts=ACTS, cuts=(0, 333, 500), zeros=512)
    assert check_packed_files(one).findings == []
    packed = one.files[0].packed(one.contents()[0])
    whole = {
        "": lambda: packed,
        ".gz": lambda: gzip.decompress(packed),
        ".zst": lambda: zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read(),
    }
    assert whole[packing]() == one.contents()[0]


def test_drawn_files_reach_every_act_and_every_kind_of_file():
    drawn = [draw_files(RandomChoices(0, place)) for place in range(150)]
    files = [file for one in drawn for file in one.files]
    assert {act for one in drawn for act in one.acts} == set(ACTS)
    assert {file.packing for file in files} == {"", ".gz", ".zst"}
    assert any(sum(count for count, _ in file.runs) > 4096 for file in files)
    assert any(sum(count * length for count, length in file.runs) > 2**21 for file in files)
    assert any(length < 0 for file in files for _, length in file.runs)
    assert any(not file.runs for file in files)
    assert {one.skip for one in drawn} == {False, True}


def test_a_reader_that_raises_is_a_difference_with_its_error(monkeypatch):
    def broken(*_, **__):
        raise TypeError("the reader itself is wrong")

    monkeypatch.setattr(packed_files, "open_source", broken)
    found = check_packed_files(case((2, 70)))
    assert "TypeError: the reader itself is wrong" in str(found.findings[0].differences)


def test_the_shortest_of_the_differing_plain_draws_is_reported(monkeypatch):
    monkeypatch.setattr(packed_files, "_told", lambda *_, **__: {"number of rows": -1})
    found, case = list(draw_layouts("packed_files", number=1, examples=0, plain=4))[-1]
    assert not found.equal
    drawn = [str(draw_files(RandomChoices(1, place))) for place in range(4)]
    assert str(case.value) == min(drawn, key=len)
