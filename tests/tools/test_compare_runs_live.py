"""Megatron-LM's own pieces and packproof, interleaved: losses, gradient norms and weights are equal to the bit in layouts of two and four ranks.

Of four ranks the suite takes layouts that hold each pair of dimensions together; `make test ARGS=--every-layout` takes all 32.
"""

import itertools
import json
import math
from pathlib import Path

import pytest

from equivalence.generators.models import layouts
from equivalence.workers import open_world, preload
from production.training.config import load
from tools.compare_runs import live
from tools.compare_runs.__main__ import main
from tools.compare_runs.comparison import Window, compare
from tools.compare_runs.run import Run

TOKENIZER = str(Path(__file__).parents[2] / "examples" / "tokenizers" / "nemotron-mini")
WORDS = ["river", "stone", "lamp", "cloud", "paper", "seven", "green", "quick", "under", "table", "music", "north"]
STEPS, PACK_LENGTH = 5, 64
LAYOUTS = [layout for size in (2, 4) for layout in layouts(size)]
DIMENSIONS = ("tensor", "context", "pipeline", "expert", "data")
SERIES = {"loss", "gradient_norm", "learning_rate", "consumed_samples", "trained_tokens"}


def sizes_of(layout):
    return {name: layout.data_size if name == "data" else getattr(layout.sizes, name) for name in DIMENSIONS}


def shows(layout):
    """Pairs of dimensions of more than one rank, and dimensions of four."""
    sizes = {name: size for name, size in sizes_of(layout).items() if size > 1}
    return {*itertools.combinations(sizes, 2), *(name for name, size in sizes.items() if size == 4)}


def few(found):
    """As few of these layouts as show all that they show, chosen greedily."""
    chosen, left = [], set().union(*map(shows, found))
    while left:
        chosen.append(max(found, key=lambda layout: len(shows(layout) & left)))
        left -= shows(chosen[-1])
    return chosen


FEW = [*(layout for layout in layouts(2) if layout.sizes.expert == 1), *few(list(layouts(4)))]


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        chosen = LAYOUTS if metafunc.config.getoption("--every-layout") else FEW
        metafunc.parametrize("layout", chosen, ids=lambda layout: layout.name.replace(" ", "-"))


def conversation(number):
    words = [WORDS[(number * 7 + place * place + place) % len(WORDS)] for place in range(9)]
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": " ".join(words[: 1 + number % 3])},
        {"role": "assistant", "content": " ".join(words[3 : 5 + number % 5])},
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of one to three conversations, some longer than a row; fewer than the steps need, so that they come again."""
    path = tmp_path_factory.mktemp("live") / "rows.jsonl.packed"
    numbers = itertools.count()
    lines = [
        {"messages": [message for _ in range(1 + row % 3) for message in conversation(next(numbers))]}
        for row in range(14)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def keys(rows):
    return {
        "policy.tokenizer.name": TOKENIZER,
        "policy.train_global_batch_size": 4,
        "policy.max_total_sequence_length": PACK_LENGTH,
        "policy.precision": "float32",
        "policy.megatron_cfg.optimizer.optimizer": "adam",
        "policy.megatron_cfg.optimizer.lr": 5e-3,
        "policy.megatron_cfg.optimizer.min_lr": 1e-3,
        "policy.megatron_cfg.optimizer.clip_grad": 1.0,
        "policy.megatron_cfg.scheduler.lr_decay_style": "cosine",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 2,
        "model.vocab_size": 4096,
        "model.num_layers": 2,
        "model.hidden_size": 16,
        "model.ffn_hidden_size": 32,
        "model.num_attention_heads": 4,
        "data.train.dataset_name": "megatron_sft_packed",
        "data.train.data_path": str(rows),
        "data.default.megatron_sft_prompt_format": "nemotron-nano-v2",
        "cluster.device": "cpu",
    }


def config(rows):
    """A job's file, beside its rows."""
    path = rows.parent / "job.yaml"
    nested = {}
    for key, value in keys(rows).items():
        *parents, name = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    path.write_text(json.dumps(nested))
    return path


def overrides(*, experts, depths, normalization, distributed):
    found = [
        f"loss.normalization={normalization}",
        f"policy.megatron_cfg.optimizer.use_distributed_optimizer={distributed}".lower(),
    ]
    if experts:
        found += [
            "model.num_moe_experts=4",
            "model.moe_ffn_hidden_size=32",
            "policy.megatron_cfg.transformer.moe_aux_loss_coeff=0.01",
        ]
    if depths:
        found += [f"policy.megatron_cfg.mtp_num_layers={depths}", "policy.megatron_cfg.mtp_use_repeated_layer=true"]
    return found


def models(layout):
    """What runs in a layout: dense and experts, with multi-token prediction and without; normalizations and optimizers in turn.

    On two ranks two of the four kinds, the others in the next layout; on four ranks one in turn; with experts shared, experts.
    """
    turn = LAYOUTS.index(layout)
    for number, (experts, depths) in enumerate(itertools.product((False, True), (0, 2))):
        if layout.sizes.expert > 1 and not (experts and depths == 2 * (turn % 2)):
            continue
        if layout.sizes.expert == 1 and layout.world_size == 2 and (number in (0, 3)) != (turn % 2 == 0):
            continue
        if layout.sizes.expert == 1 and layout.world_size == 4 and number != turn % 4:
            continue
        yield {
            "experts": experts,
            "depths": depths,
            "normalization": ("per_token", "mean_of_means")[(turn // 2 + number) % 2],
            "distributed": (turn // 4 + number // 2) % 2 == 0,
        }


def job(rows, layout, **model):
    sizes = layout.sizes
    place = [
        f"policy.megatron_cfg.{name}_model_parallel_size={size}"
        for name, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline), ("expert", sizes.expert))
    ]
    shape = [
        f"policy.train_global_batch_size={max(2, layout.data_size)}",
        f"model.num_layers={max(sizes.pipeline, 1 if model['depths'] else 2)}",
    ]
    return load(
        config(rows),
        [
            *live.ALIKE,
            f"sft.max_num_steps={STEPS}",
            *place,
            *shape,
            f"policy.megatron_cfg.context_parallel_size={sizes.context}",
            *overrides(**model),
        ],
    )


@pytest.mark.worlds
def test_five_steps_are_equal_to_the_bit(layout, rows):
    preload(*live.MODULES)
    from tools.compare_runs.live_rank import together

    jobs = [(model, job(rows, layout, **model)) for model in models(layout)]
    live.read_ahead(jobs[0][1])
    with open_world(layout.world_size, enter=live.ENTER, entry=jobs[0][1]) as world:
        for model, each in jobs:
            measured = together(world.run(live.TARGET, each))
            first, second = measured.series.values()
            assert measured.unequal_weights == [], model
            wanted = SERIES | {f"mtp_{depth}_loss" for depth in range(1, model["depths"] + 1)}
            assert wanted <= first.keys() & second.keys(), model
            for name in wanted:
                assert len(first[name]) == STEPS, (model, name)
                assert first[name] == second[name], (model, name)
                assert all(map(math.isfinite, first[name].values())), (model, name)
            assert len(set(first["loss"].values())) == STEPS, "the model does not move"


def test_the_few_layouts_hold_each_dimension_with_each_other_and_each_alone_on_four_ranks():
    shown = set().union(*map(shows, FEW))
    assert set(itertools.combinations(DIMENSIONS, 2)) <= shown
    assert set(DIMENSIONS) <= shown
    assert len(FEW) < len(LAYOUTS) / 2


def command(rows, *more):
    return main(["live", "--config", str(config(rows)), "--steps", "4", "--layout", "cp2", *more])


@pytest.mark.worlds
def test_the_command_prints_the_table_and_writes_what_it_measured(rows, tmp_path, capsys):
    depths = ["policy.megatron_cfg.mtp_num_layers=2", "model.num_layers=1", "policy.train_global_batch_size=2"]
    page, numbers = tmp_path / "live.html", tmp_path / "live.json"
    assert command(rows, *depths, "--html", str(page), "--json", str(numbers)) == 0
    printed = capsys.readouterr().out
    for said in (
        "mean step time",
        "relative throughput",
        "paired ratio",
        "gradient norm",
        "mtp 2 loss",
        "stand-in for core attention",
    ):
        assert said in printed
    found = json.loads(numbers.read_text())
    assert (found["broken_limits"], found["live"]["unequal_weights"]) == ([], [])
    assert (found["window"], found["step_seconds"]["steps"], found["live"]["layout"]) == ([3, 4], 2, "cp2")
    assert len(found["live"]["series"]["packproof"]["loss"]) == 4
    assert all(each["largest"] == 0 for each in found["differences"].values())
    assert {"driver", "norm"} <= found["live"]["stand_ins"].keys()
    assert page.read_text().count("<svg") >= 5


@pytest.mark.worlds
def test_another_normalization_shows_as_a_difference_and_is_compared_only_with_a_bound(rows, capsys):
    other = ["--normalization", "global_valid_tokens", "policy.train_global_batch_size=2"]
    assert command(rows, *other) == 2
    assert "does not have" in capsys.readouterr().err
    assert command(rows, *other, "--most-loss-difference", "0") == 1
    printed = capsys.readouterr().out
    assert "does not hold: gradient_norm differs" in printed
    assert "weights differ after the last step" in printed
    assert command(rows, *other, "--max-loss-difference", "1e-4") == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.shuffle=true", "data.order=shuffle"], "the order shuffle"),
        (["--layout", "cp"], "say sizes such as"),
        (["--layout", "dp3"], "a multiple of the 3 data-parallel ranks"),
        (["--window", "9"], "no step of 9"),
    ],
)
def test_what_cannot_be_compared_is_refused(rows, more, said, capsys):
    assert command(rows, *more) == 2
    assert said in capsys.readouterr().err


def test_ranks_that_do_not_agree_are_an_error_and_the_slowest_gives_the_time():
    preload(*live.MODULES)
    from equivalence.errors import SuiteError
    from tools.compare_runs.live_rank import Measured, together

    def rank(loss, seconds):
        return Measured(
            series={"A": {"loss": {1: loss}, "step_seconds": {1: seconds}}}, unequal_weights=["w"] * (seconds > 1)
        )

    found = together([rank(2.0, 1.0), rank(2.0, 3.0)])
    assert (found.series["A"]["step_seconds"], found.unequal_weights) == ({1: 3.0}, ["w"])
    with pytest.raises(SuiteError, match=r"rank 1 has loss 2\.5"):
        together([rank(2.0, 1.0), rank(2.5, 1.0)])


def test_every_way_of_being_unequal_is_a_broken_limit():
    def run(name, **series):
        return Run(name=name, source="here", place="here", series={"loss": {1: 1.0, 2: 2.0}, **series})

    def broken(second, weights=(), limit=0.0):
        first = run("A", gradient_norm={1: 3.0, 2: 4.0})
        return live._unequal(compare(first, second, Window(first=1, last=2)), limit, weights)

    assert broken(run("B", gradient_norm={1: 3.0, 2: 4.0})) == []
    assert broken(run("B", gradient_norm={1: 3.0, 2: 4.5})) == [
        "gradient_norm differs at 1 of 2 steps, first at 2, by up to 0.5"
    ]
    assert broken(run("B", gradient_norm={1: 3.0, 2: math.nan})) == [
        "gradient_norm differs at 1 of 2 steps, first at 2, by up to nan"
    ]
    assert broken(run("B", gradient_norm={1: 3.0})) == ["gradient_norm is missing at a step of one of the two"]
    assert broken(run("B")) == ["only one of the two reports gradient_norm"]
    assert broken(run("B", gradient_norm={1: 3.0, 2: 4.0}), ["w"]) == [
        "1 weights differ after the last step, such as w"
    ]
    assert broken(run("B", gradient_norm={1: 3.0, 2: 4.5}), ["w"], limit=0.5) == []


def test_a_step_that_trains_nothing_is_named_as_the_cause_and_still_breaks_the_limit():
    def run(name, loss, tokens):
        return Run(
            name=name,
            source="here",
            place="here",
            series={"loss": {1: 1.0} | ({} if loss is None else {2: loss}), "trained_tokens": {1: 9.0, 2: tokens}},
        )

    def broken(first, second):
        return live._unequal(compare(first, second, Window(first=1, last=2)), 0.0, [])

    differs = "loss differs at 1 of 2 steps, first at 2, by up to nan"
    missing = "loss is missing at a step of one of the two"
    first, cause = broken(run("A", math.nan, 0.0), run("B", None, 0.0))
    assert first == missing
    assert "R-LOSS-7" in cause
    assert broken(run("A", 1.0, 5.0), run("B", None, 5.0)) == [missing]
    assert broken(run("A", math.nan, 5.0), run("B", 0.0, 5.0)) == [differs]
