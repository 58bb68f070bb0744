"""A found fault's report: a case of any kind is saved, replayed, told by its class and made permanent, and replayed alone before it is believed."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from equivalence.__main__ import main
from equivalence.cases import store
from equivalence.cases.data import DataCase
from equivalence.cases.result import CheckResult
from equivalence.checks.input import files
from equivalence.checks.kinds import UNNAMED, named
from equivalence.checks.registry import CHECKS, names
from equivalence.errors import CaseError
from equivalence.generators import tokenizers
from equivalence.generators.choices import RandomChoices
from equivalence.generators.models import Layout
from equivalence.recorded import outcomes
from equivalence.runner import layout_jobs, recorded_jobs
from equivalence.runner.alone import EQUAL, checked, replayer
from equivalence.runner.job import Job
from equivalence.runner.job_runners import run
from equivalence.runner.plan import LAYOUT_CHECKS, SIZES
from equivalence.runner.row_cases import entry_of, smallest_case
from equivalence.runner.trainer_jobs import case_of
from equivalence.subjects import load
from equivalence.trainers.whole_run import RunCase
from production.online import packing
from production.parallel import context_parallel
from production.parallel.sizes import ParallelSizes
from production.rows import batch as batches

SAMPLE = Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed"
ROWS = ("reference", "production")


def layout_job(check, **changes):
    return Job(kind="layouts", subjects=ROWS, aim=check, seed=3, **({"examples": 20} | changes))


@pytest.fixture
def _ranks_reversed(monkeypatch):
    """Production's cut with the ranks in the wrong order."""
    sound = context_parallel.shard_index

    def wrong(boundaries, rank, size, **options):
        return sound(boundaries, size - 1 - rank, size, **options)

    monkeypatch.setattr(context_parallel, "shard_index", wrong)


@pytest.mark.usefixtures("_ranks_reversed")
def test_a_difference_in_data_saves_a_case_that_replays_and_becomes_permanent(tmp_path, monkeypatch, capsys):
    (found, *_) = run(layout_job("context_parallel")).differences
    assert found.first["class"] == "cut"
    case = store.parse(found.case)
    path = store.save(case, "why", folder=tmp_path)
    assert path.parent.name == "data"
    assert store.command(case, path, ROWS) == f"python -m equivalence replay {path}"
    assert main(["replay", str(path)]) == 1
    assert "index of rank" in capsys.readouterr().out
    monkeypatch.setattr(store, "SAVED", tmp_path / "saved")
    assert main(["promote", str(path), "--name", "ranks-in-order"]) == 0
    (shipped,) = store.replay(kinds=["data"])
    assert shipped[0] == tmp_path / "saved" / "data" / "ranks-in-order.json"
    # A run replays it with the others.
    tally = run(Job(kind="corpus", subjects=ROWS, paths=(str(shipped[0]),)))
    assert {each.check for each in tally.differences} == {"corpus"}
    assert tally.differences[0].first["class"] == "cut"
    monkeypatch.undo()
    assert main(["replay", str(tmp_path / "saved" / "data" / "ranks-in-order.json")]) == 0


@pytest.mark.parametrize("check", LAYOUT_CHECKS)
def test_cases_of_all_checks_of_data_survive_json_and_give_the_same_result(check):
    for place in range(2):
        case = DataCase(check=check, value=layout_jobs.LAYOUTS[check].draw(RandomChoices(5, place)))
        result, text = layout_jobs.check_data(case), case.to_json()
        again = store.parse(text)
        assert again.to_json() == text
        (replayed,) = store.check(again, ())
        assert (replayed.check, replayed.equal, replayed.refused) == (check, result.equal, result.refused)


def test_a_value_that_is_no_case_is_refused_by_name(tmp_path):
    with pytest.raises(CaseError, match="cannot hold a set"):
        DataCase(check="order", value={1}).to_json()
    (tmp_path / "it.json").write_text(
        json.dumps({"schema": 1, "check": "order", "note": "", "origin": "", "value": {"os:stat": {}}})
    )
    with pytest.raises(CaseError, match="a case holds dataclasses of the suite only, got os:stat"):
        store.read(tmp_path / "it.json")
    (tmp_path / "it.json").write_text('{"schema": 1, "nothing": 1}')
    with pytest.raises(CaseError, match=r"it\.json must be a saved case: a JSON object with one of the keys messages"):
        store.read(tmp_path / "it.json")


def test_an_exception_of_production_is_a_difference_with_its_case_and_line_and_is_made_small(monkeypatch):
    def broken(bins, *, rank, size):
        if len(bins) > 2:
            return packing.raise_bin_count(None, size)  # production's own line raises
        return bins[rank::size]

    monkeypatch.setattr(packing, "take_rank", broken)
    tally = run(layout_job("packing", examples=60))
    assert tally.errors == []
    (found,) = tally.differences
    assert (found.left, found.right, found.first["class"]) == ("expected", "production", "raised")
    assert "TypeError" in found.first["right"]
    assert "production/online/packing.py:" in found.first["right"]
    case = store.parse(found.case)
    assert len(case.value.lengths) < 10, "shrunk"
    (result,) = checked(case, ())
    assert result.findings[0].differences[0].kind == "raised"


def test_an_exception_of_a_witness_is_an_error_that_names_the_case(monkeypatch):
    from reference import packing as reference

    monkeypatch.setattr(reference, "bins_of_rank", None)
    tally = run(layout_job("packing"))
    assert tally.differences == []
    assert "TypeError" in tally.errors[0]
    assert '"check": "packing"' in tally.errors[0]


def test_a_registered_divergence_that_does_not_hold_saves_its_row(monkeypatch, tmp_path):
    subject = load("production")
    sound = subject.build_row

    def masked(messages, tokenizer, settings):
        row = sound(messages, tokenizer, settings)
        return row if row.refusal else dataclasses.replace(row, token_mask=torch.zeros_like(row.token_mask))

    monkeypatch.setattr(subject, "build_row", masked)
    tally = run(Job(kind="smallest", subjects=ROWS))
    assert tally.differences
    case = store.parse(tally.differences[0].case)
    assert case.check == "smallest"
    assert smallest_case(entry_of(case)).messages == case.messages
    path = store.save(case, "why", folder=tmp_path)
    assert store.command(case, path, ROWS) == f"python -m equivalence replay {path} --subjects reference,production"
    assert main(["replay", str(path), "--subjects", "reference,production"]) == 1
    monkeypatch.undo()
    assert main(["replay", str(path), "--subjects", "reference,production"]) == 0


def test_a_run_of_twenty_steps_is_a_case_that_survives_its_json(tmp_path):
    case = case_of("float32", Layout(sizes=ParallelSizes(context=2), data_size=1), ranks=2, seed=5)
    path = store.save(case, "why", folder=tmp_path)
    assert path.parent.name == "runs"
    again = store.read(path)
    assert dataclasses.replace(again, note="") == case
    assert store.command(case, path, ROWS) == f"python -m equivalence replay {path}"


def test_a_whole_run_is_a_case_that_survives_its_json():
    case = RunCase(path="direct", sizes=ParallelSizes(context=2), data_size=1, workers=(2, 1))
    again = store.parse(DataCase(check="whole_run", value=case).to_json())
    assert again.value == case
    assert CHECKS["whole_run"].replay == "equivalence.runner.whole_run_jobs:check_case"


def test_a_fault_that_depends_on_earlier_cases_is_reported_as_such():
    case = smallest_case_of_rows()
    wrong = load("wrong_subjects:Remembers")
    with replayer([load("reference"), wrong]) as alone:
        assert alone(case.to_json()) == EQUAL
        longer = [{**message, "content": f"{message['content']}w3 "} for message in case.messages]
        wrong.build_row(longer, tokenizers.load("word"), case.settings)
        assert alone(case.to_json()) == EQUAL, "the process that replays saw no other case"
    assert not all(each.equal for each in checked(case, [load("reference"), wrong]))


def smallest_case_of_rows():
    from equivalence.cases.row import RowCase
    from equivalence.subjects import RowSettings

    messages = tuple(
        {"role": role, "content": text} for role, text in (("system", "w0 "), ("user", "w1 "), ("assistant", "w2 ")) * 2
    )
    return RowCase(messages=messages, settings=RowSettings(pack_length=16, prompt_format="identity"), tokenizer="word")


def test_the_lists_of_checks_agree_and_no_difference_is_of_the_class_other():
    assert set(layout_jobs.LAYOUTS) == set(LAYOUT_CHECKS) == set(names("data"))
    assert set(SIZES["tiny"].trainer) <= {"dense", "experts", "hybrid", "float32"}
    for check in CHECKS:
        for tensor in ("input_ids of rank 3", "gradient of embedding", "loss of step 3", "anything", "mfsdp, rank 1"):
            assert named(UNNAMED, check=check, tensor=tensor) != UNNAMED
    assert named(UNNAMED, check="trainer", tensor="rank 0 learning rate of step 3") == "learning_rate"
    assert named(UNNAMED, check="trainer", tensor="rank 0 gradient norm of step 3") == "gradient_norm"
    assert named(UNNAMED, check="models", tensor="rank 1 microbatch 0 depth 1 token losses") == "loss"
    assert named(UNNAMED, check="models", tensor="rank 1 gradient of layer.weight") == "gradient"
    assert named(UNNAMED, check="multi_token", tensor="token_mask at depth 1 of rank 0") == "mask"
    assert named(UNNAMED, check="packing", tensor="concatenative, rank 0") == "bins"
    assert named("shift", check="rows", tensor="target_ids") == "shift"


def sabotaged(monkeypatch, wrong):
    """Make production's subject build `wrong(row)` of every row that it does not refuse."""
    subject = load("production")
    sound = subject.build_row

    def build_row(*given):
        row = sound(*given)
        return row if row.refusal else wrong(row)

    monkeypatch.setattr(subject, "build_row", build_row)


def replayed_and_promoted(text, tmp_path, monkeypatch, *sides):
    """Save a case, replay it (different), make it permanent and replay it from there once the fault is gone (equal)."""
    case = store.parse(text)
    path = store.save(case, "why", folder=tmp_path)
    assert store.command(case, path, ROWS).startswith(("python -m equivalence replay", "python -m tools.diff_row"))
    assert main(["replay", str(path), *sides]) == 1
    with monkeypatch.context() as patched:
        patched.setattr(store, "SAVED", tmp_path / "saved")
        assert main(["promote", str(path), "--name", "kept"]) == 0
    monkeypatch.undo()
    (kept,) = (tmp_path / "saved").rglob("kept.json")
    assert main(["replay", str(kept), *sides]) == 0
    return case


SIDES_OF_ROWS = ("--subjects", "reference,production")


def test_a_row_of_a_file_that_differs_saves_its_case(tmp_path, monkeypatch):
    sabotaged(monkeypatch, lambda row: dataclasses.replace(row, max_seqlen=row.max_seqlen + 1))
    job = Job(
        kind="sample", subjects=ROWS, prompt_format="nemotron-nano-v2", semantics="megatron-lm-0.19", pack_length=256,
        tokenizer="nemotron-mini", paths=(str(SAMPLE),), first=3, examples=1, is_own=True,
    )  # fmt: skip
    (found,) = run(job).differences
    case = replayed_and_promoted(found.case, tmp_path, monkeypatch, *SIDES_OF_ROWS)
    assert case.settings.pack_length == 256
    assert case.origin == found.where == f"{SAMPLE} row 3"
    assert list(case.messages) == json.loads(SAMPLE.read_text(encoding="utf-8").split("\n")[3])["messages"]


def test_a_row_that_differs_only_as_read_from_its_file_names_the_file_instead(monkeypatch):
    """The other side's file reader is at fault: a case of the row's messages would be equal."""
    from equivalence.runner import job_runners

    monkeypatch.setattr(job_runners, "check_case", lambda *_: CheckResult(check="rows"))
    sabotaged(monkeypatch, lambda row: dataclasses.replace(row, max_seqlen=row.max_seqlen + 1))
    job = Job(
        kind="sample", subjects=ROWS, prompt_format="identity", semantics="strict", pack_length=64,
        tokenizer="nemotron-mini", paths=(str(SAMPLE),), examples=1,
    )  # fmt: skip
    found = run(job).differences
    assert [each.case for each in found] == [None] * len(found)
    assert all(f"tools.diff_row {SAMPLE} --row 0" in each.command for each in found)


@pytest.mark.parametrize(("aim", "type_name"), [("packings", "Packing"), ("batches", "RecordedBatch")])
def test_a_recorded_outcome_that_differs_saves_its_case(aim, type_name, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "raise_bin_count", lambda bins, _: [*map(list, reversed(bins))])
    monkeypatch.setattr(batches, "pad_validation", lambda batch, **_: batch)
    found = run(Job(kind="recorded", subjects=ROWS, aim=aim, first=0, examples=60)).differences
    case = replayed_and_promoted(found[0].case, tmp_path, monkeypatch)
    assert type(case.value).__name__ == type_name


def test_a_recorded_row_that_differs_expects_what_was_recorded_on_every_side(tmp_path, monkeypatch, capsys):
    sabotaged(monkeypatch, lambda row: dataclasses.replace(row, target_ids=row.input_ids))
    found = run(Job(kind="recorded", subjects=ROWS, aim="nemo-rl-direct", first=0, examples=12)).differences
    case = store.parse(found[0].case)
    assert case.expected["target_ids"] != case.expected["input_ids"]
    # No screen of diff_row, which holds sides to each other: both could be wrong together.
    assert store.command(case, "it", ROWS).startswith("python -m equivalence replay it")
    replayed_and_promoted(found[0].case, tmp_path, monkeypatch, *SIDES_OF_ROWS)
    assert "expected" in capsys.readouterr().out


def test_a_recorded_row_with_only_an_exception_is_saved_unchanged():
    row = next(row for row in outcomes.rows("megatron-lm-0.19") if row.outcome is None)
    case = recorded_jobs._row_case("megatron-lm-0.19", row)
    again = store.parse(case.to_json())
    assert again.value == row
    (result,) = store.check(again, ())
    assert result.equal


def test_a_file_layer_that_differs_saves_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_read_ours", lambda *_: "bom")
    found = run(Job(kind="files", subjects=ROWS, paths=(str(tmp_path),))).differences
    case = replayed_and_promoted(found[0].case, tmp_path, monkeypatch)
    assert case.value == files.LAYERS[0]


def test_every_file_layer_survives_its_json():
    for layer in files.LAYERS:
        case = DataCase(check="files", value=layer)
        assert store.parse(case.to_json()).value == layer
