"""Both sides against recorded outcomes of other people's code (equivalence/recorded); every run of the main job holds all of them."""

import dataclasses
import functools
import gzip
import json

import pytest
import torch

from equivalence.cases.row import RowCase
from equivalence.checks.rows import recorded
from equivalence.checks.rows.recorded import (
    check_recorded_batch,
    check_recorded_conversation,
    check_recorded_packing,
    check_recorded_partition,
    check_recorded_row,
)
from equivalence.errors import InputError
from equivalence.recorded import outcomes
from equivalence.runner.job_runners import run as run_job
from equivalence.runner.plan import recorded_jobs
from equivalence.runner.recorded_jobs import MOST_DIFFERING
from equivalence.subjects import load
from production.parallel.multi_token import depth_tables

SIDES = [load("reference"), load("production")]
ORDER_OF_REFUSALS = ("no_pad_token", "row_start", "row_end", "bad_message")


def unequal(results):
    return [finding for result in results for finding in result.findings]


def test_r_pack_1_to_5_both_sides_fill_the_bins_of_nemo_rls_packers():
    packings = outcomes.packings()
    assert len(packings) == 2768
    assert {each.algorithm for each in packings} == {
        "concatenative",
        "first_fit_decreasing",
        "modified_first_fit_decreasing",
        "first_fit_shuffle",
    }
    assert sum(each.bins is None for each in packings) == 602
    assert unequal(map(check_recorded_packing, packings)) == []


def test_r_cp_1_every_implementation_of_the_zigzag_is_the_kernels():
    partitions = outcomes.partitions()
    assert len(partitions) == 938
    assert {each.size for each in partitions} >= {2, 3, 4, 8}
    # All ranks of a cut stand together; the main job takes every one.
    assert unequal(map(check_recorded_partition, partitions[::3])) == []


def test_r_cp_1_diff_row_and_the_simulator_cut_as_the_kernel():
    """The two tools that cut rows themselves: diff_row's chunks, by which it names a wrong cut, and the simulator's walk."""
    from tools.diff_row.rank.backends import Cut
    from tools.diff_row.rank.diagnose import _chunks
    from tools.simulate.walk import _make_row

    for each in outcomes.partitions()[::9]:
        cu, rank, size = each.cu_seqlens, each.rank, each.size
        cut = Cut(rank=rank, size=size, layout="zigzag", depths=0)
        assert _chunks(cu, (rank, 2 * size - 1 - rank), cut).tolist() == list(each.index)
        row = _make_row(0, torch.tensor(cu, dtype=torch.int32), cu[-1])
        assert depth_tables(row, 0, rank=rank, size=size).input_ids[0, 0].tolist() == list(each.index)


def test_r_batch_1_and_4_both_sides_collate_and_pad_as_nemo_rl():
    batches = outcomes.batches()
    assert len(batches) == 60
    assert sum(len(each.padded["sample_mask"]) > len(each.rows) for each in batches) > 20
    assert unequal(map(check_recorded_batch, batches)) == []
    # Every field that SPEC names was compared, none left out for its name.
    names = {f"{name}{when}" for name in batches[0].batch for when in ("", ", padded")}
    for side in (recorded._collated_by_reference(batches[0]), recorded._collated_by_production(batches[0])):
        assert names == side.keys()


def test_rows_of_nemo_rl_direct_are_nemo_rls_own():
    """R-SPLIT-1 and 2, R-ENDS-1, R-RENDER-1 to 3, R-ENCODE-1, R-PAD-1, R-PREFIX-1, R-TARGET-1, R-TURN-1 to 3, R-EMPTY-1, R-LAYOUT-1 to 7,
    R-SHIFT-1, R-BOUNDARY-1, R-MASK-1, R-CU-1 and the order of docs/SPEC.md#refusals: every fourth row, and all that are refused early.

    The main job also takes those of the tokenizer that takes seconds to load.
    """
    rows = outcomes.rows("nemo-rl-direct")
    assert len(rows) == 1199 + 498
    early = [row for row in rows if row.outcome.refusal is not None and row.outcome.refusal.kind in ORDER_OF_REFUSALS]
    assert len(early) == 303 + 156
    some = [row for row in [*early, *rows[::4]] if row.case.tokenizer != "nemotron-like"]
    assert unequal(check_recorded_row(row, SIDES) for row in some) == []


@pytest.mark.parametrize("preset", outcomes.MEGATRON_VERSIONS)
def test_rows_of_the_megatron_presets_are_those_of_the_recorded_versions(preset):
    """R-SPLIT-1 and 2, R-RENDER-1 to 4, R-ENCODE-1, R-PAD-1, R-TARGET-1, R-TURN-1, R-LAYOUT-1 to 7, R-SHIFT-1, R-MASK-1, R-CU-1,
    under both Megatron presets, the one that the installed package does not ship included.
    """
    rows = outcomes.rows(preset)
    assert len(rows) == (433 if preset == "megatron-lm-0.17" else 435)  # R-RENDER-3: two hand a null to a template
    assert sum(row.outcome is None for row in rows) >= 100
    some = [row for row in rows[::2] if row.case.tokenizer != "nemotron-like"]
    assert unequal(check_recorded_row(row, SIDES) for row in some) == []


def test_the_recorded_versions_differ_as_spec_says():
    """R-LAYOUT-7, R-RENDER-3: what docs/SPEC.md#presets tells of 0.17.1 and 0.18.2, row by row."""

    def differing(version, preset):
        found = {"too_many_boundaries": 0, "null content": 0, "other": 0}
        for row in outcomes.megatron_rows(version, preset):
            result = check_recorded_row(row, SIDES[:1])
            if result.refused == "too_many_boundaries" and row.outcome is not None:
                found["too_many_boundaries"] += 1
            elif result.findings:
                found["null content" if any(m.get("content") is None for m in row.case.messages) else "other"] += 1
        return found

    assert differing("0.18.2", "megatron-lm-0.19") == {"too_many_boundaries": 8, "null content": 0, "other": 0}
    assert differing("0.18.2", "megatron-lm-0.18") == {"too_many_boundaries": 0, "null content": 0, "other": 0}
    assert differing("0.17.1", "megatron-lm-0.17") == {"too_many_boundaries": 0, "null content": 2, "other": 0}
    assert differing("0.17.1", "megatron-lm-main") == {"too_many_boundaries": 8, "null content": 3, "other": 0}


def test_a_side_that_packs_or_cuts_differently_is_found(monkeypatch):
    raising = next(each for each in outcomes.packings() if each.multiple_of > 1 and each.bins is not None)
    monkeypatch.setattr(recorded.production_packing, "raise_bin_count", lambda bins, multiple_of: bins)  # noqa: ARG005
    found = [check_recorded_packing(each).findings for each in (raising, *outcomes.packings()[:200])]
    assert any("production" in (finding.left, finding.right) for findings in found for finding in findings)
    own = recorded.production_cut.shard_index
    monkeypatch.setattr(recorded.production_cut, "shard_index", lambda *given, **how: own(*given, **how).flip(0))
    (wrong, *_) = check_recorded_partition(outcomes.partitions()[0]).findings
    assert (wrong.left, wrong.right) == ("recorded", "production")


def test_another_row_or_another_refusal_is_found():
    class Wrong:
        name = "wrong"

        def build_row(self, messages, tokenizer, settings):
            row = SIDES[0].build_row(messages, tokenizer, settings)
            if row.refusal is not None:
                return dataclasses.replace(row, refusal=dataclasses.replace(row.refusal, kind="truncated"))
            return dataclasses.replace(row, position_ids=torch.roll(row.position_ids, 1))

    for preset in ("nemo-rl-direct", "megatron-lm-main"):
        rows = outcomes.rows(preset)[:60]
        assert {row.outcome is not None and row.outcome.refusal is None for row in rows} == {True, False}
        for row in rows:
            if row.case.settings.pack_length > 1:
                assert check_recorded_row(row, [Wrong()]).findings


@pytest.fixture
def folder(monkeypatch, tmp_path):
    outcomes.packings()
    outcomes.rows("megatron-lm-main")
    monkeypatch.setattr(outcomes, "FOLDER", tmp_path)
    outcomes.partitions.cache_clear()
    yield tmp_path
    outcomes.partitions.cache_clear()


def test_a_missing_file_is_an_error(folder):
    with pytest.raises(InputError, match=r"te_partition\.jsonl\.gz cannot be read"):
        outcomes.partitions()
    assert folder.is_dir()


def test_a_damaged_or_shortened_file_is_an_error(folder):
    path = folder / "te_partition.jsonl.gz"
    line = json.dumps({"cu_seqlens": [0, 4], "cp": 2, "rank": 0, "index": [0, 3]})
    for content in (b"", b"no gzip", gzip.compress(line.encode())):
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged or replaced"):
            outcomes.partitions()


def test_the_main_job_takes_every_recorded_outcome_once():
    found = {}
    for job in recorded_jobs(("reference", "production")):
        found.setdefault(job.aim, []).extend(range(job.first, job.first + job.examples))
    read = {name: getattr(outcomes, name) for name in ("packings", "partitions", "batches", "conversations")}
    rows = {name: functools.partial(outcomes.rows, name) for name in ("nemo-rl-direct", *outcomes.MEGATRON_VERSIONS)}
    assert found == {name: list(range(len(each()))) for name, each in (read | rows).items()}


def test_a_recorded_job_reports_a_few_differences_with_cases_and_names_a_missing_file(folder):
    jobs = {job.aim: job for job in recorded_jobs(("wrong_subjects:TrainsBoundaryPadding",))}
    tally = run_job(jobs["megatron-lm-main"])
    assert len(tally.differences) == MOST_DIFFERING
    assert sum(tally.rows.values()) == 435, "all are counted"
    assert {(each.left, each.right) for each in tally.differences} == {("recorded", "wrong")}
    assert RowCase.from_json(tally.differences[0].case).settings.semantics == "megatron-lm-main"
    tally = run_job(dataclasses.replace(jobs["packings"], examples=20))
    assert sum(tally.rows.values()) == 20
    assert not tally.differences
    tally = run_job(jobs["partitions"])
    assert not tally.rows
    assert "te_partition.jsonl.gz cannot be read" in tally.errors[0]
    assert not list(folder.iterdir())


def test_r_online_conversations_are_those_of_nemo_rls_own_code():
    conversations = outcomes.conversations()
    assert len(conversations) == 53
    assert unequal(map(check_recorded_conversation, conversations)) == []
    assert {each.weight for each in conversations} == {0.0, 1.0}
    assert len({each.template for each in conversations}) == 6
    assert any(not each.input_length for each in conversations), "one is so long that nothing of it is left"
