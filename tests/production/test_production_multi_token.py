"""R-MTP on the production side, held to megatron-core's own roll and fed to its own block and loss."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from production.errors import BatchRefused, PackproofError
from production.parallel.context_parallel import LAYOUTS, gather, shard_batch, shard_index
from production.parallel.multi_token import depth_tables
from production.rows.batch import Batch, FlatBatch, flatten

NAMES = ("input_ids", "position_ids", "target_ids", "token_mask")
POISON = 10**15


def flat_batch(lengths, seed=0):
    total = sum(lengths)
    made = torch.Generator().manual_seed(seed)
    return FlatBatch(
        input_ids=torch.randint(1, 1000, (1, total), generator=made),
        target_ids=torch.randint(1, 1000, (1, total), generator=made),
        token_mask=torch.randint(0, 2, (1, total), generator=made).float(),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
    )


@st.composite
def cuts(draw):
    size = draw(st.sampled_from([1, 2, 3, 4]))
    step = 1 if size == 1 else 2 * size
    pieces = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    return size, [step * each for each in pieces]


def test_r_mtp_1_published_example():
    batch = FlatBatch(
        input_ids=torch.arange(8)[None],
        target_ids=torch.tensor([[-100, 2, 3, 4, -100, -100, 6, 7]]),
        token_mask=torch.tensor([[0.0, 1, 1, 1, 0, 0, 1, 1]]),
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]),
        cu_seqlens=torch.tensor([0, 5, 8], dtype=torch.int32),
        max_seqlen=5,
    )
    tables = depth_tables(batch, 2)
    assert tables.depths == 2
    assert tables.target_ids[:, 0].tolist() == [
        [-100, 2, 3, 4, -100, -100, 6, 7],
        [2, 3, 4, -100, 0, 6, 7, 0],
        [3, 4, -100, 0, 0, 7, 0, 0],
    ]
    assert tables.token_mask[:, 0].tolist() == [
        [0, 1, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
    ]
    assert tables.input_ids[2, 0].tolist() == [2, 3, 4, 0, 0, 7, 0, 0]
    assert tables.position_ids[1, 0].tolist() == [1, 2, 3, 4, 0, 1, 2, 0]
    assert tables.rank_counts.tolist() == tables.row_counts.tolist() == [5, 5, 3]


@settings(max_examples=40)
@given(cuts(), st.integers(0, 3))
def test_r_mtp_1_is_megatrons_roll_applied_k_times(case, depths):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    size, lengths = case
    batch = flat_batch(lengths)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch.cu_seqlens)
    rolled, counts = {name: [getattr(batch, name)] for name in NAMES}, [batch.token_mask.sum()]
    for _ in range(depths):
        for name in NAMES:
            tensor, total = roll_tensor(rolled[name][-1], -1, -1, None, params)
            rolled[name].append(tensor)
            if name == "token_mask":
                counts.append(total)
    for rank in range(size):
        tables = depth_tables(batch, depths, rank=rank, size=size)
        index = shard_index(batch.cu_seqlens, rank, size)
        for name in NAMES:
            table = getattr(tables, name)
            assert table.dtype == getattr(batch, name).dtype
            assert torch.equal(table, torch.stack([each[:, index] for each in rolled[name]]))
        assert torch.equal(tables.row_counts, torch.stack(counts))
        assert torch.equal(tables.rank_counts, tables.token_mask.sum(dim=(1, 2)))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@settings(max_examples=30)
@given(case=cuts())
def test_r_mtp_2_depth_0_is_the_cut_and_all_ranks_make_the_whole(layout, case):
    size, lengths = case
    batch = flat_batch(lengths)
    ranks = [depth_tables(batch, 2, rank=rank, size=size, layout=layout) for rank in range(size)]
    whole = depth_tables(batch, 2)
    for rank, tables in enumerate(ranks):
        cut = shard_batch(batch, rank, size, layout=layout)
        assert all(torch.equal(getattr(tables, name)[0], getattr(cut, name)) for name in NAMES)
    for name, depth in itertools.product(NAMES, range(3)):
        parts = [getattr(tables, name)[depth] for tables in ranks]
        assert torch.equal(gather(parts, batch.cu_seqlens, layout=layout), getattr(whole, name)[depth])
    assert sum(tables.rank_counts for tables in ranks).tolist() == whole.row_counts.tolist()


def test_rows_of_a_batch_do_not_reach_into_each_other():
    rows = [[8, 8, 16], [32]]
    flats = [flat_batch(row, seed) for seed, row in enumerate(rows)]
    batch = Batch(
        **{name: torch.cat([getattr(flat, name) for flat in flats]) for name in NAMES},
        packed_cu_seqlens=torch.nn.utils.rnn.pad_sequence(
            [flat.cu_seqlens for flat in flats], batch_first=True, padding_value=-1
        ),
        packed_cu_seqlens_lengths=torch.tensor([4, 2]),
        packed_max_seqlen=torch.tensor([16, 32]),
        input_lengths=torch.tensor([32, 32]),
        sample_mask=torch.ones(2),
    )
    for rank in range(4):
        together = depth_tables(batch, 3, rank=rank, size=4)
        for row, flat in enumerate(flats):
            alone = depth_tables(flat, 3, rank=rank, size=4)
            for name in NAMES:
                assert torch.equal(getattr(together, name)[:, row], getattr(alone, name)[:, 0])
        flattened = depth_tables(flatten(batch), 3, rank=rank, size=4)
        assert torch.equal(flattened.row_counts, together.row_counts)


def test_values_beyond_a_segment_are_never_read():
    # The first of each segment is poison: nothing before it may see it, at any depth.
    batch = flat_batch([8, 8, 0, 16])
    poisoned = FlatBatch(**{name: value.clone() if name in NAMES else value for name, value in vars(batch).items()})
    for name in NAMES:
        getattr(poisoned, name)[:, [0, 8, 16]] = torch.nan if name == "token_mask" else POISON
    for rank in range(2):
        tables = depth_tables(poisoned, 3, rank=rank, size=2)
        index = shard_index(batch.cu_seqlens, rank, 2)
        allowed = torch.isin(index, torch.tensor([0, 8, 16]))
        for depth in range(4):
            for name in NAMES:
                table = getattr(tables, name)[depth, 0]
                seen = table.isnan() if name == "token_mask" else table == POISON
                # Depth k at position i reads i + k: poison only at depth 0.
                assert torch.equal(seen, allowed if depth == 0 else torch.zeros_like(allowed))


def test_refusals():
    batch = flat_batch([8, 8])
    with pytest.raises(PackproofError, match="must be at least 0, got -1"):
        depth_tables(batch, -1)
    with pytest.raises(BatchRefused, match=r"segment 0 must have a multiple of 6 \(2·cp\) tokens, got 8"):
        depth_tables(batch, 1, size=3)
    torn = FlatBatch(**{**vars(batch), "cu_seqlens": torch.tensor([0, 8, 16, -1], dtype=torch.int32)})
    for size, layout in itertools.product((1, 2), LAYOUTS):
        with pytest.raises(BatchRefused, match="16 and then -1"):
            depth_tables(torn, 1, size=size, layout=layout)


# Megatron-core's own block and loss, with stand-ins for the layers around them.


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def run_block(params, batch, depths, *, padding_mask=None, group=None):
    """The unmodified block's forward over layers that only read their embeddings; returns what each depth embeds."""
    from megatron.core.transformer import multi_token_prediction as mtp

    seen = []

    def embedding(*, input_ids, position_ids):
        seen.append((input_ids.clone(), position_ids.clone()))
        return torch.zeros(1)

    def layer(**kwargs):
        own = SimpleNamespace(cp_group=group, config=SimpleNamespace(mtp_detach_heads=False))
        names = ("input_ids", "position_ids", "embedding", "hidden_states", "packed_seq_params", "padding_mask")
        ids, positions, mask, _, hidden = mtp.MultiTokenPredictionLayer._get_embeddings(
            own, **{name: kwargs[name] for name in names}
        )
        if mask is not None:
            seen[-1] += (mask.clone(),)
        return hidden, ids, positions, mask

    block = SimpleNamespace(
        config=SimpleNamespace(
            mtp_num_layers=depths,
            mtp_detach_heads=False,
            pipeline_model_parallel_layout=None,
            pipeline_model_parallel_size=1,
        ),
        vp_stage=None,
        mtp_use_repeated_layer=False,
        layers=[layer] * depths,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "get_mtp_layer_offset", lambda *_: 0)
        mtp.MultiTokenPredictionBlock.forward(
            block,
            batch.input_ids,
            batch.position_ids,
            torch.zeros(4, 1, 2),
            None,
            padding_mask=padding_mask,
            packed_seq_params=params,
            embedding=embedding,
        )
    return seen


def run_loss(params, labels, loss_mask, depths, *, per_token=True, group=None, input_ids=None):
    """The unmodified process_mtp_loss on a linear head in float64; returns its gradient."""
    from megatron.core.transformer import multi_token_prediction as mtp

    count = labels.shape[1] if labels is not None else input_ids.shape[1]
    made = torch.Generator().manual_seed(3)
    hidden = torch.rand((1 + depths) * count, 1, 5, generator=made, dtype=torch.float64).requires_grad_()
    seen = []

    def loss(labels, logits):
        seen.append(labels.clone())
        return (logits.sum(-1).transpose(0, 1) * (labels % 7 + 1)).square()

    out = mtp.process_mtp_loss(
        hidden_states=hidden,
        labels=labels,
        loss_mask=loss_mask,
        output_layer=lambda x, **_: (x * x, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=loss,
        config=SimpleNamespace(
            mtp_num_layers=depths,
            mtp_detach_heads=False,
            mtp_loss_scaling_factor=0.3,
            calculate_per_token_loss=per_token,
        ),
        cp_group=group,
        packed_seq_params=params,
        input_ids=input_ids,
    )
    out.sum().backward()
    return hidden.grad, seen


def feed_of(batch, depths, *, size=1, rank=0, padding_mask=None, **options):
    from production.parallel.multi_token_feed import multi_token_params

    tables = depth_tables(batch, depths, rank=rank, size=size, padding_mask=padding_mask)
    return multi_token_params(batch, tables, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("depths", [1, 3])
def test_the_block_and_the_loss_read_the_same_from_tables_as_from_rolls(depths, per_token, padded):
    from megatron.core.transformer import multi_token_prediction as mtp

    from production.parallel.multi_token_feed import rolls_from_tables

    batch = flat_batch([5, 3, 7, 1])
    padding = batch.input_ids % 3 == 0 if padded else None
    upstream = feed_of(batch, depths)
    upstream.feed = None
    ours = feed_of(batch, depths, verify=True, padding_mask=padding)
    own_roll = mtp.roll_tensor
    with rolls_from_tables():
        assert mtp.roll_tensor is not own_roll
        expected = run_block(upstream, batch, depths, padding_mask=padding)
        gradient, labels = run_loss(upstream, batch.target_ids, batch.token_mask, depths, per_token=per_token)
        for _ in range(2):  # a pass that is computed again reads the same
            found = run_block(ours, batch, depths, padding_mask=padding)
            assert len(found) == depths
            for mine, theirs in zip(found, expected, strict=True):
                assert len(mine) == (3 if padded else 2)
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            again, labels_again = run_loss(ours, batch.target_ids, batch.token_mask, depths, per_token=per_token)
            assert torch.equal(again, gradient)
            assert all(torch.equal(a, b) for a, b in zip(labels, labels_again, strict=True))
            assert ours.feed.is_between
    assert mtp.roll_tensor is own_roll


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_weights_over_rows_do_not_depend_on_cp(size, per_token):
    from production.parallel.multi_token_feed import rolls_from_tables

    batch, depths = flat_batch([16, 8, 24]), 2
    batch.token_mask[0, :12] = torch.tensor([1.0] * 4 + [0] * 8)  # rank 0 has more to train
    whole, _ = run_loss(feed_of(batch, depths), batch.target_ids, batch.token_mask, depths, per_token=per_token)
    weights = {}
    for kind in ("rows", "rank"):
        weights[kind] = torch.empty(depths, 48, dtype=torch.float64)
        for rank in range(size):
            params = feed_of(batch, depths, size=size, rank=rank, weights=kind, verify=True)
            with rolls_from_tables():
                run_block(params, shard_batch(batch, rank, size), depths, group=Group(size))
                gradient, _ = run_loss(
                    params,
                    params.feed.tables.target_ids[0],
                    params.feed.loss_mask,
                    depths,
                    per_token=per_token,
                    group=Group(size),
                )
            labels = params.feed.tables.target_ids[1:, 0]
            # The hidden states of a rank are its own, so the weight of each token is taken out of its gradient.
            weights[kind][:, shard_index(batch.cu_seqlens, rank, size)] = _weights(gradient, labels, depths)
    mine = weights["rows"] if per_token else weights["rows"] / size  # DDP averages over cp where losses are means
    expected = _weights(whole, depth_tables(batch, depths).target_ids[1:, 0], depths)
    assert torch.allclose(mine, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(weights["rank"] / (1 if per_token else size), expected, rtol=1e-3, atol=0)


def _weights(gradient, labels, depths):
    """dL/d(loss of a token): the gradient of w·(Σx²·c)² is 4·w·x·c²·Σx²."""
    count = labels.shape[1]
    hidden = torch.rand((1 + depths) * count, 1, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden, gradient = (x.view(1 + depths, count, 5)[1:] for x in (hidden, gradient))
    return (gradient / (4 * hidden * hidden.square().sum(-1, keepdim=True)) / (labels[..., None] % 7 + 1).square())[
        ..., 0
    ]


def test_reported_losses_with_weights_over_rows_average_to_the_rows():
    # megatron-core reports sum(mask · loss) / n per rank and averages over cp.
    batch, size = flat_batch([16, 8]), 2
    loss = torch.rand(24, generator=torch.Generator().manual_seed(1))
    reported = []
    for rank in range(size):
        feed = feed_of(batch, 1, size=size, rank=rank, weights="rows").feed
        answers = [feed.answer(tensor, shifts=-1, dims=-1, size=size) for tensor in _inputs(feed)]
        mask, count = answers[-1]
        reported.append((mask[0] * loss[shard_index(batch.cu_seqlens, rank, size)]).sum() / count)
    whole = depth_tables(batch, 1)
    expected = (whole.token_mask[1, 0] * loss).sum() / whole.row_counts[1]
    assert torch.allclose(torch.stack(reported).mean(), expected)


def _inputs(feed):
    tables = feed.tables
    return [tables.input_ids[0], tables.position_ids[0], tables.target_ids[0].clone(), feed.loss_mask]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: {"tensor": None}, "nothing to roll"),
        (lambda t: {"tensor": t.input_ids[0], "shifts": 1}, "a roll by 1 over dimension -1"),
        (lambda t: {"tensor": t.input_ids[0], "dims": 0}, "a roll by -1 over dimension 0"),
        (lambda t: {"tensor": t.input_ids[0], "size": 4}, "a roll over 4 context parallel ranks"),
        (lambda t: {"tensor": t.input_ids[0][:, :-1]}, r"a tensor int64 \[1, 7\] on cpu"),
        (lambda t: {"tensor": t.token_mask[0].clone()}, r"a tensor float32 \[1, 8\] on cpu"),
        (lambda t: {"tensor": t.target_ids[0]}, "the roll of target_ids from depth 0"),
        (lambda t: {"tensor": t.input_ids[1]}, "the roll of input_ids from depth 1"),
        (lambda t: {"tensor": t.position_ids[0].clone()}, "values that are not input_ids at depth 0"),
    ],
)
def test_an_unexpected_call_names_the_expected_call(call, message):
    feed = feed_of(flat_batch([8, 8]), 2, size=2, verify=True).feed
    arguments = {"shifts": -1, "dims": -1, "size": 2} | call(feed.tables)
    expected = r" came where input_ids at depth 1 \(call 1 of 8\) was expected"
    with pytest.raises(PackproofError, match=message + ".*" + expected):
        feed.answer(arguments.pop("tensor"), **arguments)
    feed.answer(feed.tables.input_ids[0], shifts=-1, dims=1, size=2)
    assert feed.expected == "position_ids at depth 1 (call 2 of 8)"


def test_labels_from_ids_are_not_answered():
    # Without labels megatron-core rolls the ids once more: the tables hold no such thing.
    from production.parallel.multi_token_feed import rolls_from_tables

    batch = flat_batch([8, 8])
    params = feed_of(batch, 1)
    ids = params.feed.tables.input_ids[0]
    with rolls_from_tables():
        run_block(params, batch, 1)
        with pytest.raises(PackproofError, match="the roll of input_ids from depth 0 came where target_ids at depth 1"):
            run_loss(params, None, None, 1, input_ids=ids)
        run_loss(params, batch.target_ids, batch.token_mask, 1)


def test_weights_over_rows_need_the_feeds_own_mask():
    from production.parallel.multi_token_feed import rolls_from_tables

    batch = flat_batch([8, 8])
    params = feed_of(batch, 1, size=2, weights="rows", stage="loss")
    tables = params.feed.tables
    with pytest.raises(PackproofError, match="must be given the feed's own loss_mask"), rolls_from_tables():
        run_loss(params, tables.target_ids[0], tables.token_mask[0], 1, group=Group(2))


def test_a_pass_that_has_not_ended_is_refused():
    from production.parallel.multi_token_feed import rolls_from_tables

    batch = flat_batch([8, 8])
    with (
        pytest.raises(PackproofError, match=r"the end of the pass came where target_ids at depth 1 \(call 3 of 4\)"),
        rolls_from_tables(),
    ):
        run_block(feed_of(batch, 1), batch, 1)


@pytest.mark.parametrize(("stage", "calls"), [("embedding", 4), ("loss", 4), ("embedding_and_loss", 8)])
def test_a_pipeline_stage_may_hold_one_part(stage, calls):
    from production.parallel.multi_token_feed import rolls_from_tables

    batch = flat_batch([8, 8])
    params = feed_of(batch, 2, stage=stage)
    assert params.feed.expected.endswith(f"(call 1 of {calls})")
    with rolls_from_tables():
        if "embedding" in stage:
            assert len(run_block(params, batch, 2)) == 2
        if "loss" in stage:
            run_loss(params, batch.target_ids, batch.token_mask, 2)
    assert params.feed.is_between


def test_microbatches_in_flight_keep_their_own_place():
    from production.parallel.multi_token_feed import rolls_from_tables

    batches = [flat_batch([8, 8], seed) for seed in range(2)]
    params = [feed_of(batch, 2, verify=True) for batch in batches]
    with rolls_from_tables():
        for each, batch in zip(params, batches, strict=True):
            run_block(each, batch, 2)
        for each, batch in reversed(list(zip(params, batches, strict=True))):
            run_loss(each, batch.target_ids, batch.token_mask, 2)


def test_the_roll_is_undone_and_entered_once():
    from megatron.core.transformer import multi_token_prediction as mtp

    from production.parallel.multi_token_feed import rolls_from_tables

    own = mtp.roll_tensor
    with (
        pytest.raises(PackproofError, match="the rolls come from its tables"),
        rolls_from_tables(),
        rolls_from_tables(),
    ):
        pass
    assert mtp.roll_tensor is own
    with rolls_from_tables():
        rolled, total = mtp.roll_tensor(torch.tensor([[1, 2, 3]]))  # without parameters: megatron-core's own
        assert rolled.tolist() == [[2, 3, 0]]
        assert int(total) == 5


def test_copies_of_the_parameters_share_the_feed():
    import dataclasses

    params = feed_of(flat_batch([8, 8]), 1)
    assert dataclasses.replace(params, max_seqlen_q=4).feed is params.feed
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16]
