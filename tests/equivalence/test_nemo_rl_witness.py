"""A checkout of NeMo-RL as a witness: what it has and lacks is told by name, its stand-ins make no result, a difference is found.

Small made trees stand for the checkout. What the real one gave is in docs/evidence.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from equivalence.checks.cuts.microbatches import check_direct_microbatches, share_name
from equivalence.errors import InputError, WitnessError
from equivalence.generators import tokenizers
from equivalence.generators.choices import RandomChoices
from equivalence.generators.online import draw_direct
from equivalence.subjects import RowSettings, load
from equivalence.witnesses.nemo_rl import __main__ as comparison
from equivalence.witnesses.nemo_rl import checkout, parts, stand_ins
from equivalence.witnesses.nemo_rl.rows import Rows, refusal_kind
from equivalence.witnesses.nemo_rl.sides import PackerSide
from production.online import packing as production_packing
from tools.witness.__main__ import main

PACKERS = """
from reference import packing


class _Packer:
    def __init__(self, algorithm, capacity, multiple):
        self.algorithm, self.capacity, self.multiple = algorithm, capacity, multiple

    def pack(self, lengths):
        packing.check_lengths(lengths, self.capacity)
        if self.algorithm == "first_fit_shuffle":
            items = [(length, index) for index, length in enumerate(lengths)]
            random.shuffle(items)
            bins = packing.first_fit([index for _, index in items], lengths, self.capacity)
        else:
            bins = packing.PACKERS[self.algorithm](lengths, self.capacity)
        return self._adjust_bin_count(bins)

    def _adjust_bin_count(self, bins):
        return packing.raise_bin_count(bins, self.multiple)


def get_packer(algorithm, capacity, min_bin_count, bin_count_multiple):
    return _Packer(algorithm, capacity, bin_count_multiple)
"""
ROWS = """
import torch

from nemo_rl.data.interfaces import LOGGED


def megatron_sft_packed_preprocessor(line, spec, tokenizer, max_seq_length, idx, *, prompt_format, context_parallel_size, **_):
    if any(message["role"] == "odd" for message in line["packed_messages"]):
        raise ValueError("an odd role")
    if max_seq_length % 2:
        raise ValueError("segment lengths must be divisible by 2")
    ids = torch.arange(max_seq_length)
    return {
        "input_ids": ids,
        "target_ids": ids + 1,
        "token_mask": torch.ones(max_seq_length),
        "position_ids": ids,
        "packed_cu_seqlens": torch.tensor([0, max_seq_length], dtype=torch.int32),
        "packed_max_seqlen": max_seq_length,
    }
"""
DATASET = """
class MegatronSFTPackedDataset:
    def format_data(self, data):
        return {"packed_messages": data[self.chat_key], "task_name": self.task_name}
"""
INTERFACES = """
import os

import ray
import soundfile
from megatron.bridge.training import anything

os.environ["RAY_SOMETHING"] = "1"


@ray.remote
class Worker(ray.actor.Base):
    pass


@ray.remote(num_cpus=1)
def work() -> "ray.ObjectRef[int] | None":
    return 3


LOGGED = work()


def log():
    return soundfile.write("a", 3)
"""
MESSAGES = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "w0 "},
    {"role": "assistant", "content": "w1"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKPROOF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tree(tmp_path):
    """Return what writes modules below `nemo_rl` of one made checkout."""

    def write(modules):
        root = tmp_path / "checkout"
        for name, text in {"__init__": "", **modules}.items():
            path = root / "nemo_rl" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return write


def with_packers(tree, text="import random\n" + PACKERS):
    return tree({"data/packing/algorithms": text})


def with_rows(tree):
    return tree(
        {
            "data/interfaces": INTERFACES,
            "data/megatron_sft_packed": ROWS,
            "data/datasets/response_datasets/megatron_sft_packed": DATASET,
        }
    )


def test_a_folder_without_nemo_rl_and_one_without_a_part_are_refused_and_leave_nothing(tmp_path, tree, capsys):
    assert main(["add", "nemo-rl", "--source", str(tmp_path)]) == 2
    assert "must be the root of a NeMo-RL checkout" in capsys.readouterr().err
    assert main(["add", "nemo-rl", "--source", str(tree({}))]) == 2
    assert "none of the parts rows, batches" in capsys.readouterr().err
    assert main(["add", "nemo-rl"]) == 2
    assert "--source DIR" in capsys.readouterr().err
    assert checkout.find() is None


def test_add_says_by_name_what_a_checkout_has_and_lacks(tree, capsys):
    root = tree({"data/packing/algorithms": "import random\n" + PACKERS, "algorithms/utils": "def other(): ...\n"})
    assert main(["add", "nemo-rl", "--source", str(root)]) == 0
    told = capsys.readouterr().out
    assert "it has packers\n" in told
    assert "it has no rows: it lacks nemo_rl/data/megatron_sft_packed.py" in told
    assert (
        "it has no batches: it lacks nemo_rl/data/collate_fn.py, maybe_pad_last_batch of nemo_rl/algorithms/utils.py"
        in told
    )
    assert main(["list"]) == 0
    assert str(root) in capsys.readouterr().out
    assert main(["add", "nemo-rl", "--source", str(root)]) == 2
    assert "remove it first" in capsys.readouterr().err
    assert main(["remove", "nemo-rl"]) == 0
    assert root.is_dir()
    assert main(["remove", "nemo-rl"]) == 2


def test_a_parameter_tells_the_direct_loss_from_the_online_one(tree):
    losses = {
        "models/megatron/train": "class LossPostProcessor:\n    def __call__(self, data_dict): ...\n",
        "algorithms/loss/loss_functions": "class NLLLossFn: ...\n",
    }
    kept = checkout.Checkout(root=str(tree(losses)), commit="")
    assert kept.lacking()["direct loss"] == ["prepacked_loss_mask of nemo_rl/models/megatron/train.py"]


def test_a_checkout_is_reported_by_a_fingerprint_of_its_modules(tree):
    told = checkout.add(with_packers(tree)).text
    assert told == checkout.find().text
    (tree({}) / "nemo_rl" / "other.py").write_text("x = 1")
    assert checkout.find().text == told
    with_packers(tree, "import random\n\n" + PACKERS)
    assert checkout.find().text != told


def test_a_checkout_that_is_no_python_or_has_gone_is_reported(tree):
    with pytest.raises(InputError, match="is not valid Python"):
        checkout.add(with_packers(tree, "def ("))
    root = with_packers(tree, "def get_packer(): ...\ndef _adjust_bin_count(): ...\n")
    checkout._defined.cache_clear()
    checkout.add(root)
    root.rename(root.with_name("moved"))
    with pytest.raises(InputError, match="no longer at"):
        checkout.find()


@pytest.mark.parametrize("record", ["{", "[]", "null", '"a"', '{"x": 1}', '{"root": 1, "commit": ""}'])
def test_a_damaged_record_of_the_checkout_is_refused_by_name_and_can_be_removed(record, tree, capsys):
    checkout.add(with_packers(tree))
    path = checkout._folder() / "checkout.json"
    path.write_text(record)
    assert main(["list"]) == 2
    assert str(path) in (told := capsys.readouterr().err)
    assert "packproof witness remove nemo-rl" in told
    assert main(["remove", "nemo-rl"]) == 0
    assert main(["list"]) == 0


@pytest.mark.parametrize("drawn", ["0", "-5", "many"])
def test_a_comparison_of_no_case_is_refused(drawn, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "nemo-rl", "--drawn", drawn])
    assert stopped.value.code == 2
    assert "must be 1 or more" in capsys.readouterr().err


def test_outcomes_that_cannot_be_written_end_with_2_and_without_a_traceback(tmp_path):
    kept = checkout.Checkout(root=str(tmp_path), commit="")
    checkout._folder().mkdir(parents=True)
    (checkout._folder() / "checkout.json").write_text(json.dumps({"root": kept.root, "commit": kept.commit}))
    for module, names in {
        module: names for part in parts.RECORDED_PARTS for module, names in checkout.PARTS[part].items()
    }.items():
        path = (tmp_path / Path(*module.split("."))).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def {name}(): ...\n" for name in names))
    (tmp_path / "out").touch()
    command = [sys.executable, "-W", "ignore", "-m", "tools.witness", "record", "nemo-rl", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "out") in done.stderr


def test_a_name_that_a_module_lacks_and_a_package_without_stand_in_are_named(tree):
    root = tree({"some": "import no_such_package\n", "other": "from nemo_rl.gone import x\n", "packers": ""})
    with stand_ins.checkout_modules(root) as modules:
        with pytest.raises(WitnessError, match=r"nemo_rl\.packers of .* has no get_packer"):
            modules.get("nemo_rl.packers", "get_packer")
        with pytest.raises(WitnessError, match=r"needs the package no_such_package.*PACKAGES in .*stand_ins\.py"):
            modules.get("nemo_rl.some", "x")
        with pytest.raises(WitnessError, match=r"has no module nemo_rl\.gone"):
            modules.get("nemo_rl.other", "x")


def test_a_stand_in_decorates_while_it_is_imported_and_never_makes_a_result(tree):
    root, shown, path = with_rows(tree), transformers.__version__, list(sys.path)
    with stand_ins.checkout_modules(root) as modules:
        interfaces = modules.module("nemo_rl.data.interfaces")
        assert interfaces.work() == 3
        assert transformers.__version__ == shown
        with pytest.raises(WitnessError, match=r"soundfile\.write was called, and only stands in"):
            interfaces.log()
    assert not [name for name in sys.modules if name.split(".")[0] in ("nemo_rl", "ray", "soundfile")]
    assert "megatron.bridge" not in sys.modules
    assert "RAY_SOMETHING" not in os.environ
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError):
        __import__("soundfile")


def test_every_stand_in_is_reported_and_what_is_installed_has_none():
    told = "\n".join(stand_ins.stand_ins())
    assert all(name in told for name in ("ray: ", "megatron.bridge: ", "thd_get_partitioned_indices", "5.11.0"))
    assert stand_ins._is_stood_in("ray")
    assert stand_ins._is_installed("torch")
    assert not any(line.startswith("torch:") for line in stand_ins.stand_ins())


def test_transformers_shows_the_lent_version_only_while_modules_are_imported(tree):
    root = tree({"policy": "import transformers\nSEEN = transformers.__version__\n"})
    with stand_ins.checkout_modules(root) as modules:
        assert modules.get("nemo_rl.policy", "SEEN") == stand_ins.TRANSFORMERS
        assert transformers.__version__ != stand_ins.TRANSFORMERS


def test_packers_of_a_checkout_are_compared_and_a_bin_in_another_order_is_found(tree):
    with stand_ins.checkout_modules(with_packers(tree)) as modules:
        verdict = parts.from_checkout("packers", modules, 40)
    assert (verdict.served, verdict.cases, verdict.equal) == ("checkout", 2768 + 40, 2768 + 40)
    assert verdict.refused > 600
    wrong = ("import random\n" + PACKERS).replace("return packing.raise_bin_count(", "return _turned(")
    wrong += "\n\ndef _turned(bins, multiple):\n    return packing.raise_bin_count(bins, multiple)[::-1]\n"
    with stand_ins.checkout_modules(with_packers(tree, wrong)) as modules:
        verdict = parts.from_checkout("packers", modules, 0)
    assert verdict.equal < verdict.cases == 2768
    assert "bins of nemo_rl and production" in verdict.fields
    assert "; differ: " in verdict.text
    assert verdict.first


def test_the_given_order_replaces_the_shuffle_and_is_put_back(tree):
    with stand_ins.checkout_modules(with_packers(tree)) as modules:
        side = PackerSide(modules)
        packing = parts.Packing(
            algorithm="first_fit_shuffle", lengths=(1, 2, 3), capacity=3, multiple_of=1, order=(2, 0, 1), bins=None
        )
        assert side.bins(packing) == [[2], [0, 1]]
        assert modules.module("nemo_rl.data.packing.algorithms").random.__name__ == "random"


def test_without_a_checkout_recorded_outcomes_serve_and_the_table_says_so(capsys):
    assert comparison.main(["compare", "--part", "batches", "--part", "conversations", "--part", "direct loss"]) == 2
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("nemo_rl: recorded outcomes; there is no checkout")
    assert [line.split() for line in told[1:3]] == [
        ["batches", "recorded", "60", "of", "60", "equal"],
        ["conversations", "recorded", "53", "of", "53", "equal,", "4", "of", "them", "refused", "alike"],
    ]
    assert "not compared: no outcome of it is recorded" in told[3]
    assert told[-1].startswith("2 of 3 parts compared (recorded); not compared: direct loss")
    assert comparison.main(["compare", "--part", "batches"]) == 0, "what was asked for is compared"
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 part compared (recorded)"


def test_without_a_checkout_not_all_parts_are_compared_and_the_status_says_so(capfd):
    assert main(["compare", "nemo-rl"]) == 2
    assert capfd.readouterr().out.splitlines()[-1].startswith("4 of 9 parts compared (recorded)")
    assert main(["compare", "nemo-rl", "--part", "conversations"]) == 0


def test_a_side_that_differs_from_recorded_outcomes_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(production_packing, "raise_bin_count", lambda bins, multiple_of: bins)  # noqa: ARG005
    assert comparison.main(["compare", "--part", "packers"]) == 1
    assert "bins of nemo_rl and production (" in capsys.readouterr().out


def test_what_a_checkout_lacks_is_reported_and_its_recorded_outcomes_serve(tree, capsys):
    checkout.add(with_packers(tree))
    assert comparison.main(["compare", "--part", "batches", "--drawn", "1"]) == 0
    told = capsys.readouterr().out
    assert "stand-in: ray: workers of a cluster" in told
    assert "not compared: the checkout lacks nemo_rl/data/collate_fn.py" in told
    assert "60 of 60 equal" in told
    assert comparison.main(["record", "--out", "unused"]) == 2
    assert "nemo_rl has no rows" in capsys.readouterr().err


def test_an_exception_of_a_checkout_ends_with_2_and_says_where(tree, capsys):
    checkout.add(with_packers(tree, "def get_packer(*given, **options): return 3\ndef _adjust_bin_count(): ...\n"))
    assert comparison.main(["compare", "--part", "packers"]) == 2
    told = capsys.readouterr().err
    assert "packers could not be compared: AttributeError" in told
    assert "sides.py:" in told


def test_rows_of_a_checkout_are_a_subject_in_a_process_of_its_own(tree):
    root = with_rows(tree)
    checkout.add(root)
    subject = load("nemo_rl")
    try:
        assert f"checkout {root}" in subject.version
        assert any(line.startswith("ray: ") for line in subject.stand_ins())
        settings = RowSettings(pack_length=6, prompt_format="identity", semantics="nemo-rl-direct")
        assert subject.covers(settings)
        assert not subject.covers(settings.replace(semantics="strict"))
        row = subject.build_row(MESSAGES, tokenizers.load("word"), settings)
        assert row.target_ids.tolist() == [1, 2, 3, 4, 5, 6]
        refused = subject.build_row(MESSAGES, tokenizers.load("word"), settings.replace(pack_length=7))
        assert refused.refusal.kind == "indivisible_segment"
    finally:
        subject.close()


def test_an_exception_that_stands_for_no_refusal_is_raised(tree):
    settings = RowSettings(pack_length=6, prompt_format="identity", semantics="nemo-rl-direct")
    with stand_ins.checkout_modules(with_rows(tree)) as modules:
        rows = Rows(modules)
        with pytest.raises(ValueError, match="an odd role"):
            rows.build_row([{"role": "odd", "content": ""}], tokenizers.load("word"), settings)
    assert refusal_kind(RuntimeError("of nothing known")) is None


def test_the_subject_says_what_it_needs(tree):
    with pytest.raises(InputError, match="witness add nemo-rl --source DIR"):
        load("nemo_rl")
    checkout.add(with_packers(tree))
    with pytest.raises(InputError, match=r"nemo_rl has no rows: .* lacks .*megatron_sft_packed\.py.*; it has packers"):
        load("nemo_rl")


def test_a_witness_of_shares_is_compared_with_every_side():
    case = draw_direct(RandomChoices(1, 0))
    name = share_name("cu_seqlens", 0)
    boundaries = torch.tensor([0, 1], dtype=torch.int32)
    found = check_direct_microbatches(case, {"own": lambda _: {name: boundaries}}).findings
    assert {finding.right for finding in found} == {"own"}
