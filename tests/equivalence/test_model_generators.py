"""Drawn training steps: every one fits its layout, everything that a run must have had is drawn, and a saved one is the same again."""

import itertools

import pytest
import torch

from equivalence.cases import store
from equivalence.cases.step import ModelCase
from equivalence.generators.models import AIMS, FEATURES, STRATEGIES, domain_factor, draw_cases, features, layouts
from equivalence.runner.plan import SIZES, model_jobs

LAYOUTS = [layout for size in (1, 2, 4, 8) for layout in layouts(size)]


def test_all_layouts_are_there():
    assert [len(layouts(size)) for size in (1, 2, 4, 8)] == [1, 7, 25, 65]
    names = {layout.name for layout in LAYOUTS}
    assert {"one rank", "tp2", "cp2", "pp2", "dp2", "tp2 ep2", "tp2 cp2 pp2", "cp2 dp2 ep4", "tp2 cp2 dp2 ep8"} <= names
    assert len(names) == len(LAYOUTS)
    for layout in LAYOUTS:
        assert layout.sizes.data(layout.world_size) == layout.data_size


@pytest.mark.parametrize("check", STRATEGIES)
def test_drawn_steps_fit_their_layouts(check):
    for number, layout in enumerate(LAYOUTS):
        for case in draw_cases(check, layout, AIMS[number % len(AIMS)], number=number, examples=1):
            fits(case)
            batch = case.batch()
            assert batch.input_ids.max() < case.shape.vocab_size
            assert torch.equal(batch.input_ids, case.on_one_rank().batch().input_ids)
            assert torch.equal(batch.token_mask, case.on_one_rank().batch().token_mask)


def fits(case):
    sizes, shape = case.sizes, case.shape
    unit = 2 * sizes.context if sizes.context > 1 else 1
    assert {sum(row) for row in case.rows} == {case.pack_length}
    assert all(segment > 0 and segment % unit == 0 for row in case.rows for segment in row)
    assert case.pack_length % domain_factor(sizes) == 0
    assert len(case.rows) % case.data_size == 0
    assert len(case.masked) == len(case.rows)
    layers = len(shape.pattern) // 2 if shape.architecture == "hybrid" else shape.layers
    assert layers % sizes.pipeline == 0
    divided = (shape.heads, shape.query_groups, shape.ffn_hidden_size, shape.vocab_size)
    assert all(each % sizes.tensor == 0 for each in divided)
    assert shape.experts % sizes.expert == 0
    assert shape.experts or sizes.expert == 1
    assert not (shape.tied and shape.depths and sizes.pipeline > 1)
    channels = shape.hidden_size // shape.heads
    assert int(channels * shape.rotary_percent) % 2 == 0
    if case.check == "paths":
        assert case.multiple % domain_factor(sizes) == 0
        for row, lengths in zip(case.rows, case.lengths, strict=True):
            assert all(0 < true <= segment for true, segment in zip(lengths, row, strict=True))
            spare = [segment - true for true, segment in zip(lengths, row, strict=True)]
            assert all(each < case.multiple for each in spare[:-1]), "only the last one takes what stages need"
            assert spare[-1] < case.multiple or sizes.pipeline > 1
    if case.check == "leaks":
        assert max(map(len, case.rows)) > 1


@pytest.mark.parametrize("seed", [0, 1])
def test_the_smallest_run_has_everything(seed):
    from equivalence.runner.step_jobs import cases_of

    jobs = list(model_jobs(SIZES["tiny"], seed, ()))
    names = {job.layout.name for job in jobs}
    assert {layout.name for size in (1, 2, 4) for layout in layouts(size)} <= names
    assert sum(job.layout.world_size == 8 for job in jobs) >= 8
    cases = [case for job in jobs for case in cases_of(job, job.layout)]
    assert {each for case in cases for each in features(case)} >= set(FEATURES)


def test_the_same_seed_draws_the_same_steps():
    layout = layouts(4)[-1]
    once, again = (draw_cases("models", layout, AIMS[0], number=7, examples=3) for _ in range(2))
    assert once == again
    assert len(once) == 3
    assert once != draw_cases("models", layout, AIMS[0], number=8, examples=3)


def test_a_saved_step_is_the_same_again(tmp_path):
    for check, layout in itertools.product(STRATEGIES, LAYOUTS[::9]):
        (case,) = draw_cases(check, layout, AIMS[1], number=3, examples=1)
        assert ModelCase.from_json(case.to_json()) == case
        path = store.save(case, "why", folder=tmp_path)
        assert store.read(path).rows == case.rows
        assert store.save(case, "another reason", folder=tmp_path) == path, "the same step is one file"
    assert len(list(store.replay(tmp_path, kinds=("models",)))) >= len(list(tmp_path.glob("models/*.json"))) > 20
