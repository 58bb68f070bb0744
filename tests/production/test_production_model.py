"""Model settings, layouts and weights: what is refused before anything is built, and one set of weights in every layout."""

import pytest
import torch

from production.errors import PackproofError
from production.parallel.sizes import ParallelSizes

pytestmark = pytest.mark.worlds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"transformer": {"hidden_sizes": 8}}, "hidden_sizes is not a field"),
        ({"transformer": {"sequence_parallel": True}}, "follows from the layout"),
        ({"architecture": "hybrid"}, "must be set for the architecture hybrid, got None"),
        ({"hybrid_layer_pattern": "*-"}, "architecture gpt"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(given, words):
    from production.model.model import ModelSettings

    with pytest.raises(PackproofError, match=words):
        ModelSettings(vocab_size=8, max_sequence_length=8, **given)


@pytest.mark.parametrize(
    ("given", "layers"), [({}, 8), ({"hybrid_layer_pattern": "*-*-", "architecture": "hybrid"}, 4)]
)
def test_projections_back_into_the_residuals_are_drawn_as_megatron_lm_draws_them(given, layers):
    """0.02 over the root of layers; of a GPTModel's each, which is attention and MLP, over that of two."""
    from production.model.model import ModelSettings, transformer_config

    shape = {"hidden_size": 8, "num_attention_heads": 2} | ({} if given else {"num_layers": 4})
    config = transformer_config(
        ModelSettings(vocab_size=8, max_sequence_length=8, transformer=shape, **given), ParallelSizes()
    )
    torch.manual_seed(1)
    drawn = torch.empty(400, 400)
    config.output_layer_init_method(drawn)
    assert drawn.std().item() == pytest.approx(0.02 / layers**0.5, rel=0.01)


def test_megatron_cores_reason_against_a_model_is_passed_on():
    from production.model.model import ModelSettings, transformer_config

    settings = ModelSettings(
        vocab_size=8,
        max_sequence_length=8,
        transformer={"num_layers": 1, "hidden_size": 6, "num_attention_heads": 4, "num_query_groups": 3},
    )
    with pytest.raises(PackproofError, match="megatron-core refuses"):
        transformer_config(settings, ParallelSizes(expert=2))


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        (ParallelSizes(tensor=2), 3, "must be a multiple of tp 2"),
        (ParallelSizes(expert=4), 2, "must be a multiple of ep 4"),
    ],
)
def test_a_world_that_a_layout_does_not_fit_is_refused(sizes, world, words):
    with pytest.raises(PackproofError, match=words):
        sizes.data(world)


def test_a_layout_leaves_the_rest_of_the_world_to_data_parallelism():
    assert ParallelSizes(tensor=2, context=2).data(8) == 2
    assert ParallelSizes(tensor=8, context=16, expert=32).data(512) == 4
    with pytest.raises(PackproofError, match="the tensor parallel size must be at least 1, got 0"):
        ParallelSizes(tensor=0)


def weights_of(case, worker):
    """On a rank: the parts of the model that it holds, after filling them from the whole."""
    from equivalence.trainers.production_step import Part
    from production.model.model import build_model
    from production.model.weights import drawn, fill, shards

    del worker
    model = build_model(case.shape.settings(case.sizes, case.pack_length), case.sizes)
    fill(model, drawn(3))
    return [
        Part(
            name=each.name,
            shape=each.shape,
            part=tuple((s.start, s.stop) for s in each.part),
            values=each.values.clone(),
        )
        for each in shards(model)
        if each.is_main
    ]


@pytest.mark.parametrize(
    "sizes",
    [ParallelSizes(), ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(expert=2, context=2)],
    ids=["1", "tp2", "pp2", "ep2cp2"],
)
def test_every_layout_holds_the_same_weights_each_value_once(sizes):
    from equivalence.trainers.production_step import ModelCase, ModelShape
    from equivalence.workers import open_world, preload
    from production.model.weights import assemble, drawn

    preload("equivalence.trainers.production_step", "production.training.step")
    shape = ModelShape(layers=2, experts=4, dense_layers=1, depths=1)
    case = ModelCase(shape=shape, sizes=sizes, rows=((8,),), masked=(1.0,))
    with open_world(
        max(sizes.of_a_replica, sizes.expert), enter="equivalence.trainers.production_step:layout", entry=sizes
    ) as world:
        ranks = world.run(f"{__name__}:weights_of", case)
    parts = {}
    for rank in ranks:
        for each in rank:
            place = tuple(slice(*bounds) for bounds in each.part)
            parts.setdefault(each.name, []).append((each.shape, place, each.values))
    whole = assemble(parts)
    draw = drawn(3)
    assert all(torch.equal(tensor, draw(name, tuple(tensor.shape))) for name, tensor in whole.items())
    assert {name for name in whole if "local_experts" in name} == {
        f"{layer}.mlp.experts.local_experts.{expert}.linear_fc{half}.weight"
        for layer in ("decoder.layers.1", "mtp.layers.0.mtp_model_layer")
        for expert in range(4)
        for half in (1, 2)
    }


def test_parts_that_leave_a_hole_or_overlap_are_refused():
    from production.model.weights import assemble

    piece = ((4,), (slice(0, 2),), torch.zeros(2))
    with pytest.raises(PackproofError, match="got 2 values from no rank and 0 from several"):
        assemble({"w": [piece]})
    with pytest.raises(PackproofError, match="got 2 values from no rank and 2 from several"):
        assemble({"w": [piece, piece]})
