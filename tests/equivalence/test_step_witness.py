"""Training steps of another version run in a process of their own and are held to the installed version's, to the bit."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from equivalence.cases.step import ModelCase, ModelShape
from equivalence.errors import InputError
from equivalence.witnesses import step_comparison, store
from equivalence.witnesses.serve_steps import INSTALLED
from equivalence.witnesses.step_comparison import StepResult, compare_steps, differing_tensors, run_steps, step_cases
from production.parallel.sizes import ParallelSizes
from tools.witness import __main__ as command

SMALL = ModelShape(layers=1, hidden_size=8, heads=2, query_groups=1, ffn_hidden_size=8, depths=2)
CASES = [
    ModelCase(shape=SMALL, rows=((4, 4, 8), (16,)), masked=(0.9, 0.5), seed=3),
    ModelCase(
        shape=SMALL, sizes=ParallelSizes(context=2), rows=((5, 11),), masked=(1.0,), seed=4
    ),  # cp 2 cannot cut it
    ModelCase(
        shape=dataclasses.replace(SMALL, experts=2, depths=1),
        sizes=ParallelSizes(tensor=2),
        rows=((4, 12),),
        masked=(0.9,),
        seed=5,
    ),
]


@pytest.fixture(scope="module")
def installed():
    version, results = run_steps(INSTALLED, CASES)
    assert re.fullmatch(r"0\.19\.\d+", version)
    return results


@pytest.fixture(scope="module")
def by_its_folder():
    """The installed version, found as a witness is: by the folder that stands first on the path."""
    import megatron.core

    return run_steps(str(Path(megatron.core.__file__).parents[2]), CASES)[1]


def with_ranks(result, change, *, rank=0):
    ranks = list(result.ranks)
    ranks[rank] = change(ranks[rank])
    return StepResult(ranks=ranks)


def next_bit(tensor):
    changed = tensor.clone().reshape(-1)
    changed[0] = torch.nextafter(changed[0], torch.tensor(torch.inf, dtype=changed.dtype))
    return changed.reshape(tensor.shape)


def of_gradient(part_of_name):
    def change(rank):
        parts = list(rank.gradients)
        number = next(number for number, part in enumerate(parts) if part_of_name in part.name)
        parts[number] = dataclasses.replace(parts[number], values=next_bit(parts[number].values))
        return dataclasses.replace(rank, gradients=parts)

    return change


CHANGES = {
    "token losses": lambda rank: dataclasses.replace(
        rank, token_losses=[[next_bit(rank.token_losses[0][0]), *rank.token_losses[0][1:]], *rank.token_losses[1:]]
    ),
    "reported": lambda rank: dataclasses.replace(rank, reports=[next_bit(rank.reports[0]), *rank.reports[1:]]),
    "reported loss": lambda rank: dataclasses.replace(rank, reported=rank.reported + 1e-7),
    "reported of each depth": lambda rank: dataclasses.replace(rank, mtp_losses=next_bit(rank.mtp_losses)),
    "gradient of decoder.layers.*.mlp.linear_fc1.weight": of_gradient("decoder.layers.0.mlp.linear_fc1.weight"),
    "gradient norm": lambda rank: dataclasses.replace(rank, gradient_norm=rank.gradient_norm * (1 + 1e-7)),
}


def test_a_version_in_its_own_process_gives_the_same_steps_to_the_bit(installed, by_its_folder):
    dense, indivisible, experts = compare_steps("0.19.2", CASES, installed, by_its_folder)
    assert (dense.kind, dense.equal, dense.is_expected) == ("gpt dense, depths, one rank", 1, True)
    assert (experts.kind, experts.equal, experts.is_expected) == ("gpt experts, depths, 2 ranks", 1, True)
    assert len(by_its_folder[2].ranks) == 2
    assert len(by_its_folder[0].ranks[0].mtp_losses) == 2
    assert not indivisible.is_expected


def test_a_case_that_cannot_run_appears_under_its_kind_with_the_error(installed, by_its_folder):
    told = compare_steps("0.19.2", CASES, installed, by_its_folder)[1].text
    assert "gpt dense, depths, 2 ranks" in told
    assert re.search(r"0 of 1 equal; cannot run \(1\): rank [01] raised ValueError at .*: segments of", told)


@pytest.mark.parametrize(("tensor", "change"), CHANGES.items(), ids=CHANGES)
def test_a_step_that_is_wrong_in_one_bit_is_found_by_name(tensor, change, installed):
    wrong = [with_ranks(installed[0], change)]
    (verdict,) = compare_steps("0.19.2", CASES[:1], installed[:1], wrong)
    assert verdict.differing == {tensor: 1}
    assert not verdict.is_expected
    assert f"0 of 1 equal; differ: {tensor} (1)" in verdict.text


def test_a_rank_that_is_missing_is_a_difference(installed):
    assert differing_tensors(installed[2].ranks, installed[2].ranks[:1]) == {"places of ranks"}


def test_another_version_s_half_of_a_step_is_not_taken_for_equal(installed):
    """The same process with another case's weights and rows, as a version that feeds another batch would give."""
    version, other = run_steps(INSTALLED, [dataclasses.replace(CASES[0], seed=8)])
    (verdict,) = compare_steps(version, CASES[:1], installed[:1], other)
    assert verdict.equal == 0
    assert {"token losses", "reported loss", "reported of each depth", "gradient norm"} <= verdict.differing.keys()


def test_the_known_difference_of_0_18_appears_with_its_reason_and_must_occur(installed):
    alike = [installed[2]]
    wrong = [with_ranks(installed[2], of_gradient("local_experts.0.linear_fc1.weight"))]
    (known,) = compare_steps("0.18.2", CASES[2:], alike, wrong)
    assert (known.equal, sum(known.known.values()), known.is_expected) == (0, 1, True)
    assert "does not add up the gradients of experts" in known.text
    (absent,) = compare_steps("0.18.2", CASES[2:], alike, alike)
    assert not absent.is_expected
    assert "nothing, though it must" in absent.text
    (elsewhere,) = compare_steps("0.18.2", CASES[2:], alike, [with_ranks(wrong[0], CHANGES["reported loss"])])
    assert elsewhere.differing == {"reported loss": 1}
    (later,) = compare_steps("0.20.0", CASES[2:], alike, wrong)
    assert not later.is_expected


def test_a_folder_without_megatron_lm_is_refused_with_the_reason(tmp_path):
    with pytest.raises(InputError, match=r"cannot run on .*both must come from"):
        run_steps(str(tmp_path), CASES[:1])


def test_steps_of_every_kind_of_model_are_compared_on_one_rank_and_on_two():
    kinds = {step_comparison.kind_of(case) for case in step_cases()}
    models = ("gpt dense", "gpt experts", "hybrid dense", "hybrid experts")
    assert {f"{model}, depths, {ranks}" for model in models for ranks in ("one rank", "2 ranks")} <= kinds
    layouts = {case.layout for case in step_cases()}
    assert {"one rank", "tp2", "cp2", "pp2", "dp2", "dp2 ep2"} <= layouts


def test_a_version_before_0_19_is_given_rows_and_keywords_as_its_own(monkeypatch):
    from megatron.core import utils as upstream

    from equivalence.trainers import megatron_step, production_step

    case = CASES[0]
    assert production_step.baseline_rows(case)[0]["cu_seqlens"].shape == (1, case.pack_length + 1)
    assert megatron_step.packed_keyword() == "has_cu_seqlens"
    monkeypatch.delattr(upstream, "flatten_batch_for_packed_sequences")
    monkeypatch.setattr(upstream, "get_batch_on_this_tp_rank", lambda batch, is_sft: (batch, is_sft))
    assert production_step.baseline_rows(case)[0]["cu_seqlens"].tolist() == [[0, 4, 8, 16]]
    assert megatron_step.packed_keyword() == "is_sft"


def command_with(monkeypatch, answers):
    """Compare two versions' steps with what `answers` gives by root, in place of a process."""
    kept = {each: store.VersionWitness(version=each, made_of="", root=each, own_transformers=False) for each in answers}
    monkeypatch.setattr(command.store, "find", kept.__getitem__)
    monkeypatch.setattr(command, "_compare_versions", lambda _versions: 0)
    monkeypatch.setattr(step_comparison, "step_cases", lambda: CASES[:1])

    def run(root, _cases):
        answer = answers.get(root, answers["same"])
        if isinstance(answer, InputError):
            raise answer
        return "0.19.2", answer

    monkeypatch.setattr(step_comparison, "run_steps", run)


def test_the_command_says_how_many_steps_are_equal_and_ends_with_1_otherwise(monkeypatch, capsys, installed):
    wrong = [with_ranks(installed[0], CHANGES["token losses"])]
    lost = InputError("training steps cannot run on lost: No module named 'megatron.core.models.hybrid'")
    command_with(monkeypatch, {"same": installed[:1], "wrong": wrong, "lost": lost})
    assert command.main(["compare", "same"]) == 0
    assert "1 of 1 equal to the bit" in capsys.readouterr().out
    assert command.main(["compare", "wrong", "same"]) == 1
    assert "differ: token losses (1)" in capsys.readouterr().out
    assert command.main(["compare", "lost"]) == 1
    assert "0 of 1 equal; training steps cannot run on lost: No module" in capsys.readouterr().out
    assert command.main(["compare", "lost", "--rows-only"]) == 0
    assert "training steps" not in capsys.readouterr().out
