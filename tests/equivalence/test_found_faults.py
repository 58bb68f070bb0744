"""A found fault's report: a case of any kind is saved, replayed, told by its class and made permanent, and replayed alone before it is believed."""

import dataclasses
import json

import pytest
import torch

from equivalence.__main__ import main
from equivalence.cases import store
from equivalence.cases.data import DataCase
from equivalence.checks.kinds import UNNAMED, named
from equivalence.checks.registry import CHECKS, names
from equivalence.errors import CaseError
from equivalence.generators import tokenizers
from equivalence.generators.choices import RandomChoices
from equivalence.generators.models import Layout
from equivalence.runner import layout_jobs
from equivalence.runner.alone import EQUAL, checked, replayer
from equivalence.runner.job import Job
from equivalence.runner.jobs import run
from equivalence.runner.plan import LAYOUT_CHECKS, SIZES
from equivalence.runner.row_cases import entry_of, smallest_case
from equivalence.runner.run_jobs import case_of
from equivalence.subjects import load
from equivalence.trainers.whole_run import RunCase
from production.online import packing
from production.parallel import context_parallel
from production.parallel.sizes import ParallelSizes

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
def test_what_any_check_of_data_draws_survives_its_json_and_is_checked_alike(check):
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


def test_a_fault_with_memory_is_said_to_need_others_before_its_smallest_case():
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
