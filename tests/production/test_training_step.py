"""A step's own refusals, and that it takes rows apart without copying; what it computes is held in the model checks."""

import dataclasses

import pytest
import torch

from production.parallel.sizes import ParallelSizes

pytestmark = pytest.mark.worlds


def _case(**changes):
    from equivalence.trainers.production_step import ModelCase, ModelShape

    return ModelCase(shape=ModelShape(layers=1, depths=1), rows=((8, 8), (16,)), masked=(0.5, 0.5), **changes)


def refusals(case, worker):
    """On a rank: what each of these wrong steps says."""
    from production.errors import PackproofError
    from production.model.model import build_model
    from production.training.step import StepSettings, forward_backward, split_rows, wrap

    def said(call):
        try:
            call()
        except PackproofError as error:
            return str(error)
        return "nothing"

    shape = case.shape.settings(case.sizes, case.pack_length)
    model = build_model(shape, case.sizes)
    settings = StepSettings(normalization="per_token", depths=1)
    found = {"depths": said(lambda: wrap(model, StepSettings(normalization="per_token", depths=2)))}
    told = dataclasses.replace(shape, transformer={**shape.transformer, "calculate_per_token_loss": True})
    summing = build_model(told, case.sizes)
    found["normalization"] = said(lambda: wrap(summing, StepSettings(normalization="mean_of_means", depths=1)))
    wrapped = wrap(model, settings)
    found["none"] = said(lambda: forward_backward(wrapped, [], settings, worker.entered))
    rows = split_rows(case.batch())
    shorter = split_rows(dataclasses.replace(case, rows=((8,),), masked=(0.5,)).batch())
    if case.sizes.pipeline > 1:
        found["lengths"] = said(lambda: forward_backward(wrapped, [rows[0], shorter[0]], settings, worker.entered))
    return found


def test_wrong_steps_are_refused_before_they_begin():
    from equivalence.workers import open_world, preload

    preload("equivalence.trainers.production_step", "production.training.step")
    with open_world(2, enter="equivalence.trainers.production_step:layout", entry=ParallelSizes(pipeline=2)) as world:
        case = dataclasses.replace(
            _case(sizes=ParallelSizes(pipeline=2)), shape=dataclasses.replace(_case().shape, layers=2)
        )
        found = world.run(f"{__name__}:refusals", case)[1]
    assert "must equal the depths of the step, 2, got 1" in found["depths"]
    assert "calculate_per_token_loss must not be set with the normalization mean_of_means" in found["normalization"]
    assert "must have at least one microbatch, got 0" in found["none"]
    assert "one length between pipeline stages, got several" in found["lengths"]


def test_rows_are_taken_apart_as_views():
    from production.training.step import split_rows

    batch = _case().batch()
    rows = split_rows(batch)
    assert [row.input_ids.shape for row in rows] == [(1, 16), (1, 16)]
    assert rows[1].input_ids.data_ptr() == batch.input_ids[1].data_ptr()
    assert torch.equal(rows[0].packed_cu_seqlens, torch.tensor([[0, 8, 16]], dtype=torch.int32))
