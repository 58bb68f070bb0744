"""The parts of a check that need ranks, and what they choose: edges, small layouts, short rows, order."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from production.parallel.sizes import ParallelSizes
from production.rows.builder import Row
from production.training.config import load, order_settings
from tools.check import layout_part, order_part
from tools.check.__main__ import main
from tools.check.cut_rows import cut_rows
from tools.check.edges import EDGES, EdgeRows, spread
from tools.check.progress import Progress
from tools.check.scan import scan
from tools.check.shrink import small_layouts, small_shape
from tools.check.target import open_target

ROOT = Path(__file__).parents[2]
NEVER = float("inf")
LINES = (ROOT / "examples" / "packed" / "sample.jsonl.packed").read_text().split("\n")[8:13]
MEGATRON = "policy.megatron_cfg"

pytestmark = [
    pytest.mark.worlds,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture
def open_job(tmp_path, monkeypatch):
    """Opens the small job of the examples on a few rows, with changes, on a number of ranks."""
    monkeypatch.chdir(ROOT)

    def opened(ranks, *, lines=LINES, **changes):
        (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        overrides = [f"{key}={value}" for key, value in changes.items()]
        rows = [f"data.{split}.data_path={tmp_path / 'rows.jsonl'}" for split in ("train", "validation")]
        job = load("examples/jobs/small-cpu.yaml", ["policy.train_global_batch_size=4", *rows, *overrides])
        target = open_target(job, ranks)
        quiet = Progress(clock=lambda: 0.0)
        return target, scan(target, target.train, most=8, deadline=NEVER, progress=quiet), quiet

    return opened


def check_layout(opened, **options):
    target, scanned, progress = opened
    return layout_part.check_layout(target, scanned, progress=progress, **{"deadline": NEVER} | options)


CP = {f"{MEGATRON}.context_parallel_size": 2, f"{MEGATRON}.mtp_num_layers": 1}


def test_training_steps_in_the_jobs_layout_agree_with_every_witness(open_job):
    result = check_layout(open_job(2, **CP))
    assert (result.status, result.findings) == ("equal", [])
    assert result.numbers["steps"] == ["cp2"]
    assert "Megatron-LM's own pieces in the same layout" in result.witnesses
    assert any(line.startswith("CUDA") for line in result.not_shown)


def test_a_fault_in_the_ranks_is_reported_by_training_steps(open_job):
    from equivalence.mutants.layout_faults import entered

    result = check_layout(open_job(2, **CP), entered=entered("shift_across_segments"))
    assert result.status == "differs"
    assert "training step" in result.findings[0].what
    assert result.findings[0].where == "layout cp2"


def test_a_layout_that_loses_tokens_is_reported_with_the_row(open_job):
    from equivalence.mutants.layout_faults import find

    with find("owner_off_by_one").entered():
        result = check_layout(open_job(2, **CP), deadline=-NEVER)
    assert result.status == "differs"
    assert any("held" in each.what or "belong" in each.what for each in result.findings)


def test_the_walk_without_training_steps_proves_nothing(open_job):
    result = check_layout(open_job(2, **CP), deadline=-NEVER)
    assert result.status == "not run"
    assert "training steps: the budget was spent" in result.not_shown


def test_rows_that_the_layout_cannot_cut_are_named(open_job):
    changes = {f"{MEGATRON}.context_parallel_size": 3, "policy.max_total_sequence_length": 2048}
    target, scanned, progress = open_job(3, **changes)
    result = layout_part.check_layout(target, scanned, deadline=-NEVER, progress=progress)
    assert result.status == "differs"
    assert "line" in result.findings[0].where


@pytest.mark.parametrize(
    ("sizes", "data", "names"),
    [
        ({"context": 2}, 2, ["cp2 dp2"]),
        ({"tensor": 2, "context": 2, "pipeline": 2}, 1, ["tp2 cp2 pp2"]),
        ({"tensor": 8, "context": 16, "expert": 32}, 4, ["tp2 cp2 dp2 ep2"]),
        ({"tensor": 4, "context": 4, "pipeline": 4}, 4, ["tp2 cp2 pp2", "cp2 pp2 dp2"]),
        ({"context": 16}, 1, ["cp8"]),
        ({"tensor": 8, "pipeline": 4}, 1, ["tp4 pp2"]),
        ({"context": 3}, 5, ["cp2 dp4"]),
        ({"pipeline": 2, "context": 8, "expert": 4}, 1, ["cp4 pp2 ep2"]),
        ({"tensor": 2, "expert": 2, "expert_tensor": 2}, 2, ["tp2 dp2 ep2"]),
    ],
)
def test_a_layout_is_shrunk_to_eight_ranks_and_keeps_every_dimension(sizes, data, names):
    real = ParallelSizes(**sizes)
    small = small_layouts(real, data)
    assert [each.name for each in small] == names
    for name in ("tensor", "context", "pipeline", "expert"):
        assert any((getattr(each.sizes, name) > 1) == (getattr(real, name) > 1) for each in small)
    assert any((each.data_size > 1) == (data > 1) for each in small)
    for each in small:
        each.sizes.data(each.sizes.of_a_replica * each.data_size)
        assert each.sizes.of_a_replica * each.data_size <= 8


def test_a_small_model_is_of_the_jobs_kind(monkeypatch):
    monkeypatch.chdir(ROOT)
    job = load("examples/jobs/published-comparison.yaml")
    (small, *_) = small_layouts(ParallelSizes(context=2, pipeline=2), 2)
    shape, lacks = small_shape(job, small, vocabulary=100)
    assert shape.architecture == job.model.architecture
    assert bool(shape.experts) == (job.model.num_moe_experts is not None)
    assert shape.vocab_size >= 100
    assert (
        shape.depths == min(3, job.model.hybrid_layer_pattern.count("/") if job.model.hybrid_layer_pattern else 0)
        or shape.depths > 0
    )
    assert "bfloat16" in "".join(lacks)


def built(ids, boundaries, trained):
    length = len(ids)
    mask = torch.zeros(length)
    mask[trained] = 1
    return Row(
        input_ids=torch.tensor(ids),
        target_ids=torch.tensor([*ids[1:], 0]),
        token_mask=mask,
        position_ids=torch.zeros(length, dtype=torch.int64),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        max_seqlen=length,
        context_parallel_size=1,
        report={},
    )


def test_short_rows_keep_equal_ids_equal_and_the_tokens_that_train():
    ids = [100_000 + at % 50 for at in range(400)]
    rows = [built(ids, [0, 300, 400], [290, 350]), built(ids, [0, 10, 400], [5, 380])]
    batches, lengths, count = cut_rows(rows, unit=8, segment_unit=4, pad_id=7)
    assert {sum(each) for each in lengths} == {64}
    assert all(part % 4 == 0 for each in lengths for part in each)
    assert count <= 51  # the pad id beside the fifty
    for batch, row in zip(batches, rows, strict=True):
        assert int(batch.token_mask.sum()) == int(row.token_mask.sum())
        assert int(batch.input_ids.max()) < count
        places = batch.token_mask[0].nonzero().view(-1)
        # The label of a token is the id that follows it, as before.
        assert torch.equal(batch.target_ids[0, places[places < 63]], batch.input_ids[0, places[places < 63] + 1])


EDGE_ROWS = {
    "refused": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}],
    "trains nothing": [{"role": "user", "content": "a"}],
    "overfull": [{"role": "user", "content": "word " * 3000}, {"role": "assistant", "content": "a"}],
    "control token in content": [{"role": "user", "content": "a<SPECIAL_12>b"}, {"role": "assistant", "content": "a"}],
    "pad id in content": [{"role": "user", "content": "a<unk>b"}, {"role": "assistant", "content": "a"}],
    "unrendered message": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "c"},
    ],
}


@pytest.mark.parametrize("edge", EDGE_ROWS)
def test_a_row_near_an_edge_is_collected(open_job, edge):
    row = {"messages": [{"role": "system", "content": ""}, *EDGE_ROWS[edge]]}
    _, scanned, _ = open_job(1, lines=[*LINES, json.dumps(row)])
    assert len(LINES) in scanned.edges.rows[edge], scanned.edges.rows
    assert edge in EDGES


def test_the_row_that_is_full_to_the_token_and_both_extremes_are_collected(open_job):
    _, scanned, _ = open_job(1)
    assert scanned.edges.rows["exact fill"]
    assert scanned.edges.rows["longest"]
    assert scanned.edges.rows["shortest"]


def test_edge_rows_are_kept_up_to_a_bound_and_the_others_are_counted():
    kept = EdgeRows(most=5)
    for row in range(50):
        kept.put("exact fill", row)
    kept.put("overfull", 3)
    assert len(set(kept.rows["exact fill"])) == 5
    assert kept.left_out() == {"exact fill": 45}
    assert "overfull" in kept.chosen()[3]


@pytest.mark.parametrize(("rows", "count"), [(10, 64), (1000, 64), (1, 1)])
def test_a_sample_is_spread_over_the_whole_file(rows, count):
    found = spread(rows, count)
    assert len(found) == min(rows, count)
    assert found == sorted(set(found))
    ends = [*found, rows]
    assert max(after - before for before, after in itertools.pairwise([0, *ends])) <= 2 * (rows // len(found) + 1)


@pytest.mark.parametrize(
    "changes", [{}, {"data.shuffle": "false", "data.last_batch": "wrap"}, {"data.last_batch": "stop"}]
)
def test_the_order_is_compared_at_both_ends_of_an_epoch_and_at_a_resume(open_job, changes):
    target, _, progress = open_job(2, **changes, **{"policy.train_global_batch_size": 2})
    result = order_part.check_job_order(target, progress=progress)
    assert result.status == "equal"
    assert result.compared >= 8


def test_a_wrong_order_is_reported(open_job):
    from equivalence.mutants.layout_faults import find

    target, _, progress = open_job(2, **{"policy.train_global_batch_size": 2, "sft.max_num_epochs": 3})
    with find("epochs_alike").entered():
        result = order_part.check_job_order(target, progress=progress)
    assert result.status == "differs"
    assert "deal other rows" in result.findings[0].what


def test_a_large_file_is_ordered_by_a_smaller_one_of_the_same_remainder():
    assert order_part._smaller(1_000_003, 8) % 8 == 1_000_003 % 8
    assert order_part._smaller(1_000_003, 8) <= order_part.MOST_ROWS + 8
    assert order_part._smaller(777, 8) == 777
    settings = order_settings(load(ROOT / "examples/jobs/small-cpu.yaml"), 2)
    assert next(order_part._places((777,), settings))[0] == "first steps"


def test_a_small_job_is_proven_by_all_parts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in LINES))
    rows = [f"data.{split}.data_path={path}" for split in ("train", "validation")]
    status = main(["examples/jobs/small-cpu.yaml", *rows, "--rows", "2", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "proven: nothing differs" in printed
    assert "of bare inspection" in printed
