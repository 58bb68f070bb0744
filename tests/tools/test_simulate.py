"""The simulator tells a good layout from a bad one, and its numbers are those of small jobs counted by hand."""

import html.parser
import itertools
import json

import pytest
import torch

from production.errors import BatchRefused, PackproofError
from production.parallel.multi_token import depth_tables
from tools.simulate import walk as walk_module
from tools.simulate.__main__ import main
from tools.simulate.costs import costs_of
from tools.simulate.layout import Job, draw_rows, read_rows
from tools.simulate.page import render_page
from tools.simulate.walk import MOST_FAULTS, walk


def call(line):
    return main(line.split())


def job_of(**changes):
    settings = {
        "tp": 2,
        "cp": 2,
        "ep": 4,
        "dp": 2,
        "pack_length": 48,
        "rows": 4,
        "layout": "zigzag",
        "sequence_parallel": True,
        "depths": 2,
        "hidden": 8,
        "kv_heads": 4,
        "head_dim": 16,
        "topk": 2,
        "value_bytes": 2,
    }
    return Job(**settings | changes)


def rows_of(*lengths):
    return [torch.tensor([0, *itertools.accumulate(row)], dtype=torch.int32) for row in lengths]


ROWS = rows_of([8, 16, 24], [48], [4, 4, 40], [24, 0, 24])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_good_layout_has_no_fault(layout, sequence_parallel):
    found = walk(job_of(layout=layout, sequence_parallel=sequence_parallel), ROWS)
    assert found.faults == []
    assert found.tokens.shape == (2, 2, 2, 2)
    assert found.tokens.unique().tolist() == [12 if sequence_parallel else 24]


def test_work_counts_the_keys_that_each_query_sees():
    found = walk(job_of(), ROWS)
    # A segment of L tokens has L·(L+1)/2 pairs, and the zigzag shares them equally.
    pairs = [[8, 16, 24], [48], [4, 4, 40], [24, 24]]
    for number, row in enumerate(pairs):
        whole = sum(length * (length + 1) // 2 for length in row)
        assert found.work[number % 2, number // 2].tolist() == [whole // 2] * 2
    contiguous = walk(job_of(layout="contiguous"), ROWS)
    # Row 1 is one segment: its second half sees more.
    assert contiguous.work[1, 0].tolist() == [24 * 25 // 2, 48 * 49 // 2 - 24 * 25 // 2]


def test_messages_and_bytes_by_hand():
    found = walk(job_of(), ROWS)
    costs = costs_of(found)
    segments = 3 + 1 + 3 + 2  # the empty one sends nothing
    assert int(found.segments.sum()) == segments
    assert (
        costs.roll_messages == 2 * segments * (2 - 1) * 4 * 2 * 2
    )  # rolls of four tensors, two depths, two tensor ranks
    assert costs.roll_messages_of_a_row == 2 * 3 * 1 * 4 * 2
    assert costs.roll_bytes == 2 * segments * 2 * 2 * (3 * 8 + 4)
    assert costs.table_messages == 0
    # K and V of the other half of the row, two of four heads, 16 values of 2 bytes.
    assert costs.attention_bytes == 24 * 2 * 2 * 16 * 2
    assert costs.attention_bytes_in_all == costs.attention_bytes * 4 * 4
    assert costs.expert_bytes == 12 * 2 * 8 * 2 * 3 // 4
    alone = costs_of(walk(job_of(cp=1, tp=1, ep=1), ROWS))
    assert (alone.roll_messages, alone.attention_bytes, alone.expert_bytes) == (0, 0, 0)


def test_published_count_of_messages():
    # semantics.md section 7: 64 segments, cp 2 and 4: 128 and 384 messages a roll.
    for cp, messages in ((2, 128), (4, 384)):
        job = job_of(cp=cp, tp=1, ep=1, dp=1, rows=1, depths=1, pack_length=64 * 8)
        assert costs_of(walk(job, rows_of([8] * 64))).roll_messages == 4 * messages


def spoil(monkeypatch, change):
    """Let the walk see tables that a wrong implementation would give."""

    def wrong(batch, depths, *, rank, size, layout):
        return change(depth_tables(batch, depths, rank=rank, size=size, layout=layout), rank)

    monkeypatch.setattr(walk_module, "depth_tables", wrong)


def roll_ids(tables, rank):
    if rank == 1:
        tables.input_ids[0] = tables.input_ids[0].roll(1, -1)
    return tables


def repeat_token(tables, rank):
    for name in ("input_ids", "target_ids", "position_ids", "token_mask"):
        if rank == 0:
            getattr(tables, name)[..., 1] = getattr(tables, name)[..., 0]
    return tables


def spoil_deep_label(tables, rank):
    if rank == 1:
        tables.target_ids[2, 0, 3] += 1
    return tables


def spoil_position(tables, _rank):
    tables.position_ids[0, 0, 5] += 1
    return tables


def spoil_mask(tables, _rank):
    tables.token_mask[1] = tables.token_mask[0]
    return tables


def other_row(tables, _rank):
    tables.input_ids[0] += 48
    return tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (roll_ids, "context-parallel rank 1: target_ids at depth 0 does not belong to its token"),
        (repeat_token, "position 0 is held 2 times, not 1"),
        (spoil_deep_label, "context-parallel rank 1: target_ids at depth 2 does not belong to its token"),
        (spoil_position, "context-parallel rank 0: position_ids at depth 0 does not belong to its token"),
        (spoil_mask, "token_mask at depth 1 does not belong to its token"),
        (other_row, "tokens of another row"),
    ],
)
def test_a_wrong_cut_is_a_fault(monkeypatch, change, message):
    spoil(monkeypatch, change)
    found = walk(job_of(), ROWS)
    assert any(message in fault for fault in found.faults), found.faults
    assert len(found.faults) <= MOST_FAULTS


def test_faults_are_the_exit_status(monkeypatch, capsys):
    spoil(monkeypatch, spoil_position)
    assert call("--cp 2 --dp 1 --pack-length 64 --segments 3") == 1
    assert "row 0, data-parallel rank 0, context-parallel rank 0: position_ids at depth 0" in capsys.readouterr().out


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(BatchRefused, match=r"row 1: segment 1 must have a multiple of 4 \(2·cp\) tokens, got 6"):
        walk(job_of(rows=2), rows_of([48], [8, 6, 34]))
    with pytest.raises(BatchRefused, match="row 0: cu_seqlens must end at 48, the number of tokens, got 40"):
        walk(job_of(rows=2), rows_of([8, 32], [48]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 0}, "cp: must be at least 1, got 0"),
        ({"depths": -1}, "depths: must be at least 0, got -1"),
        ({"rows": 5}, "rows: must be a multiple of dp, 2, got 5"),
        ({"ep": 3}, "must divide tp·cp·dp, 8, got 3"),
        ({"layout": "spiral"}, "must be one of zigzag, contiguous, got 'spiral'"),
        ({"tp": 5, "ep": 1}, "48 tokens over 2 × 5 ranks"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(PackproofError, match=message):
        job_of(**changes)


def test_drawn_rows_are_rows():
    job = job_of(cp=4, pack_length=512, ep=1)
    rows = draw_rows(job, segments=9, seed=3)
    assert len(rows) == 4
    for row in rows:
        lengths = row.diff()
        assert (row.dtype, int(row[0]), int(row[-1]), len(lengths)) == (torch.int32, 0, 512, 9)
        assert (lengths > 0).all()
        assert (lengths % 8 == 0).all()
    assert not torch.equal(rows[0], rows[1])
    assert all(map(torch.equal, rows, draw_rows(job, segments=9, seed=3)))
    assert [row.tolist() for row in draw_rows(job, segments=1, seed=0)] == [[0, 512]] * 4
    with pytest.raises(PackproofError, match="must be from 1 to 64, the units of"):
        draw_rows(job, segments=65, seed=0)
    with pytest.raises(PackproofError, match="516 tokens at cp 4"):
        draw_rows(job_of(cp=4, pack_length=516, tp=1), segments=2, seed=0)


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('[8, 16]\n{"cu_seqlens": [0, 4, 24]}\n')
    assert [row.tolist() for row in read_rows(path)] == [[0, 8, 24], [0, 4, 24]]
    for text, message in (
        ("[8, 16]\n[8,", "line 2: the line must be JSON"),
        ("[8, -1]", "line 1: the line must have lengths"),
        ("[8.0]", "line 1: the line must have lengths"),
        ("[true]", "line 1: the line must have lengths"),
        ("{}", "line 1: the line must have lengths"),
        ("", "must have at least one row, got 0"),
    ):
        path.write_text(text)
        with pytest.raises(PackproofError, match=message):
            read_rows(path)
    with pytest.raises(PackproofError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")


def test_the_command_line(tmp_path, capsys):
    picture, file = tmp_path / "ranks.html", tmp_path / "rows.jsonl"
    sizes = "--tp 2 --cp 4 --ep 4 --dp 2 --pack-length 512 --rows 4"
    assert call(f"{sizes} --segments 8 --depths 2 --picture {picture}") == 0
    printed = capsys.readouterr().out
    assert "16 ranks, 4 rows of 512 tokens, 32 segments" in printed
    assert "every token is owned exactly once" in printed
    assert "3,072" in printed  # 2·32·3 a roll, 4 rolls, 2 depths, 2 tensor ranks
    assert picture.exists()
    file.write_text("".join(json.dumps([8, 504]) + "\n" for _ in range(4)))
    assert call(f"--cp 4 --dp 2 --pack-length 512 --file {file}") == 0
    assert "4 rows of 512 tokens, 8 segments" in capsys.readouterr().out
    assert call(f"--cp 4 --dp 2 --pack-length 512 --rows 6 --file {file}") == 2
    assert "rows: must be at most the 4 rows of the file, got 6" in capsys.readouterr().err
    file.write_text("[6, 506]\n")
    assert call(f"--cp 4 --pack-length 512 --file {file}") == 2
    assert "row 0: segment 0 must have a multiple of 8 (2·cp) tokens, got 6" in capsys.readouterr().err


class Page(html.parser.HTMLParser):
    """Counts elements, and fails on one that is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.counts, self.outside = [], {}, []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_picture_is_whole_and_self_contained(layout):
    found = walk(job_of(layout=layout), ROWS)
    page = Page()
    page.feed(render_page(found, costs_of(found)))
    assert page.open == []
    assert page.outside == []
    assert "script" not in page.counts
    assert page.counts["svg"] == 2 + 1
    # Two bars a row, and each drawn segment in four pieces (contiguous: the row in two).
    assert page.counts["rect"] == 2 * 4 + (3 * 4 if layout == "zigzag" else 2)


def test_the_picture_escapes_and_shows_faults(monkeypatch):
    spoil(monkeypatch, spoil_position)
    found = walk(job_of(), ROWS)
    found.faults.append("<b>")
    text = render_page(found, costs_of(found))
    assert "&lt;b&gt;" in text
    assert "Every token" not in text
