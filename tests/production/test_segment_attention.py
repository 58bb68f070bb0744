"""Attention within segments, alone and over context-parallel ranks, held to dense masked softmax; the gather's two gradients; the norm.

Dense attention in a wider precision is the truth. In float64 and float32 ours may be off from it by what rounding can do, derived
value by value; in bfloat16 by at most twice what dense attention in bfloat16 is off.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import segment_attention_world as world
import torch
from attention_truth import assert_exact, dense, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence.workers import open_world, preload
from production.errors import PackproofError
from production.model.device import attention_kernels, attention_share
from production.model.device.attention import SegmentAttention
from production.model.device.attention_kernels import FUSED_CPU, TILED, kernel_for
from production.model.device.attention_share import Share, attend, runs_of
from production.model.device.norm import RMSNorm
from production.parallel.context_parallel import shard_index
from production.parallel.gather import gather_ranks

KERNELS = {"fused": FUSED_CPU, "tiled": TILED}


@pytest.fixture(scope="module")
def ranks():
    """What each of the four ranks found."""
    preload("segment_attention_world", megatron=False)
    with open_world(world.SIZE) as ranks:
        return ranks.run("segment_attention_world:found")


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setattr(attention_share, "kernel_for", lambda _device: KERNELS[request.param])


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    heads=st.sampled_from(world.HEADS),
    dtype=st.sampled_from(world.DTYPES),
    scale=st.sampled_from([None, 0.25, 1.5]),
    kernel=st.sampled_from(sorted(KERNELS)),
    seed=st.integers(0, 100),
)
def test_attention_on_one_rank_is_dense_attention(lengths, heads, dtype, scale, kernel, seed):
    tensors = world.inputs(lengths, heads, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_share, "kernel_for", lambda _device: KERNELS[kernel])
        patch.setattr(attention_kernels, "_TILE", 16)
        found = world.run(world.module(softmax_scale=scale), lengths, tensors)
    assert_exact(found, lengths, tensors, scale or heads[2] ** -0.5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_longer_than_a_tile_are_dense_attention(dtype):
    lengths, heads = [3, 530, 700], (2, 1, 4, 4)
    tensors = world.inputs(lengths, heads, dtype, 5)
    found = world.run(world.module(), lengths, tensors)
    assert_exact(found, lengths, tensors, 0.5)


@pytest.mark.worlds
def test_attention_over_ranks_is_dense_attention_of_the_whole_row(ranks):
    seen = set()
    for number, (cp, lengths, heads, dtype, kernel) in enumerate(world.cases()):
        tensors = world.inputs(lengths, heads, dtype, number)
        for group in world.GROUPS[cp]:
            whole = [torch.full_like(each, torch.nan) for each in (tensors[3], *tensors[:3])]
            for rank, member in enumerate(group):
                index = shard_index(world.boundaries(lengths), rank, cp)
                for name, share in zip(whole, ranks[member][f"attention {number}"], strict=True):
                    name[index] = share
            assert_exact(whole, lengths, tensors, 0.7 if number % 2 else heads[2] ** -0.5)
        seen.add((cp, dtype, kernel))
    assert {each[0] for each in seen} == {2, 3, 4}
    assert {each[1:] for each in seen} == {(dtype, kernel) for dtype in world.DTYPES for kernel in KERNELS}


@pytest.mark.worlds
def test_attention_over_ranks_gives_the_same_bits_again(ranks):
    seen = 0
    for results in ranks:
        for name in (name for name in results if name.startswith("again")):
            first = results[name.replace("again", "attention")]
            assert all(torch.equal(*pair) for pair in zip(results[name], first, strict=True))
            seen += 1
    assert seen >= 8


@pytest.mark.worlds
def test_nothing_of_other_segments_reaches_one_over_ranks(ranks):
    seen = 0
    for results in ranks:
        for name in (name for name in results if name.startswith("poisoned")):
            clean = results[name.replace("poisoned", "unpoisoned")]
            assert all(len(each) for each in clean)
            assert all(torch.equal(*pair) for pair in zip(results[name], clean, strict=True))
            seen += 1
    assert seen >= 20


@pytest.mark.worlds
def test_a_segment_that_the_ranks_do_not_divide_is_refused(ranks):
    for results in ranks:
        kind, what = results["refused"]
        assert kind == "indivisible_segment"
        assert "segment 1 must have a multiple of 8 (2·cp) tokens, got 12" in what


@pytest.mark.usefixtures("kernel")
def test_nothing_of_other_segments_reaches_one():
    lengths = [5, 9, 0, 9, 3]
    tensors = world.inputs(lengths, (4, 2, 8, 8), torch.float32, 1)
    clean = world.run(world.module(), lengths, tensors)
    poisoned = [each.clone() for each in tensors]
    for each in poisoned:
        each[:5] = each[14:] = torch.nan
    found = world.run(world.module(), lengths, poisoned)
    assert all(torch.equal(ours[5:14], before[5:14]) for ours, before in zip(found, clean, strict=True))
    assert all(each[:5].isnan().all() for each in found)


@pytest.mark.usefixtures("kernel")
def test_a_segment_alone_has_the_bits_that_it_has_in_a_row():
    lengths = [64, 64, 200, 7]
    tensors = world.inputs(lengths, (4, 2, 8, 8), torch.float32, 1)
    together = world.run(world.module(), lengths, tensors)
    for start, length in ((0, 64), (64, 64), (128, 200), (328, 7)):
        alone = world.run(world.module(), [length], [each[start : start + length] for each in tensors])
        assert all(torch.equal(ours, row[start : start + length]) for ours, row in zip(alone, together, strict=True))


@pytest.mark.usefixtures("kernel")
def test_the_same_inputs_give_the_same_bits():
    tensors = world.inputs([100, 33, 33], (4, 2, 8, 8), torch.bfloat16, 1)
    first, second = (world.run(world.module(), [100, 33, 33], tensors) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.usefixtures("kernel")
def test_inputs_may_be_views_of_one_tensor():
    lengths = [9, 4, 4]
    mixed = torch.randn(17, 2, 4 * 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = mixed[..., :16].reshape(17, 4, 8), mixed[..., 16:24], mixed[..., 24:]
    upper = world.inputs(lengths, (4, 2, 8, 8), torch.float64, 0)[3]
    plain = world.run(world.module(), lengths, (query, key, value, upper))
    leaf = mixed.clone().requires_grad_()
    # The last dimension strided too, as after a transpose.
    turned = leaf[..., 16:24].transpose(1, 2).contiguous().transpose(1, 2)
    given_params = world.params(world.boundaries(lengths))
    found = world.module()(
        leaf[..., :16].reshape(17, 4, 8), turned, leaf[..., 24:], None, packed_seq_params=given_params
    )
    # Of a strided gradient too.
    found.backward(upper.flatten(1).t().contiguous().t())
    assert torch.equal(found.view_as(upper), plain[0])
    assert torch.equal(leaf.grad, torch.cat([plain[1].reshape(17, 2, 16), *plain[2:]], dim=-1))


def test_padded_boundaries_count_before_true_ones():
    lengths = [6, 10]
    tensors = world.inputs(lengths, (2, 2, 8, 8), torch.float64, 3)
    true = torch.tensor([0, 5, 12], dtype=torch.int32)
    padded = world.boundaries(lengths)
    attention = world.module()
    both = world.params(true, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    only = world.params(padded, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, cu_seqlens_kv=None)
    expected = truth(lengths, tensors, 8**-0.5)[0][0].reshape(16, 16).astype(np.float64)
    for given_params in (both, only):
        found = attention(*tensors[:3], None, packed_seq_params=given_params)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-14)


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                self.values = max(self.values, each.untyped_storage().nbytes() // each.element_size())
        return found


class Repeats:
    """An exchange whose other ranks hold what this one does: for memory alone."""

    def __init__(self, size):
        self.size = size

    def gather(self, share):
        return torch.cat([share] * self.size)

    def summed(self, whole):
        return whole[: len(whole) // self.size].clone()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("size", [1, 4])
def test_memory_is_linear_in_the_row(size, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_TILE", 256)
    largest = {}
    for total in (1024, 4096):
        heads = (2, 1, 8, 8)
        tensors = world.inputs([total // size], heads, torch.float32, 0)
        leaves = [each.requires_grad_() for each in tensors[:3]]
        with Largest() as seen:
            exchange = Repeats(size) if size > 1 else None
            share = Share(runs=runs_of([0, total]), exchange=exchange, rank=size - 1, size=size)
            attend(*leaves, share, scale=0.3).backward(tensors[3])
        largest[total] = seen.values
    assert largest[4096] <= 4 * largest[1024]
    # A mask of the rank's queries against all keys, which one that builds it would show.
    assert largest[4096] < 4096 * 4096 // size // 4
    # Nothing but the whole row's keys and values together, or one tile for each head, is larger than the inputs.
    assert largest[4096] <= max(4096 * 2 * 8, 2 * 256 * 256)


def test_the_memory_test_sees_a_mask():
    with Largest() as seen:
        dense([512], world.inputs([512], (1, 1, 8, 8), torch.float32, 0), 0.3)
    assert seen.values >= 512 * 512


def test_only_the_share_is_kept_for_backward():
    total, size = 4096, 4
    query, key, value, _ = world.inputs([total // size], (2, 1, 8, 8), torch.float32, 0)
    kept = []
    share = Share(runs=runs_of([0, total]), exchange=Repeats(size), rank=1, size=size)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        attend(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), share, scale=0.3)
    assert kept
    assert max(kept) <= query.numel()


def megatron_config(**fields):
    """A real one: the names of the fields that are looked at must be its own."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "attention_dropout": 0.0}
    return TransformerConfig(**plain | {"normalization": "RMSNorm"} | fields)


def built(config, **fields):
    from megatron.core.transformer.enums import AttnMaskType

    plain = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "cp_comm_type": "p2p"}
    plain |= {"softmax_scale": None, "pg_collection": SimpleNamespace(cp=None)}
    return SegmentAttention(config=config, layer_number=3, **plain | fields)


def test_megatrons_own_config_parameters_and_mask_types_are_taken():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    lengths = [4, 0, 7]
    tensors = world.inputs(lengths, (2, 2, 8, 8), torch.float64, 3)
    cu = world.boundaries(lengths)
    attention = built(megatron_config(), attn_mask_type=AttnMaskType.padding_causal)
    given_params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu.clone())
    found = attention(
        *tensors[:3],
        None,
        attn_mask_type=AttnMaskType.causal,
        attention_bias=None,
        packed_seq_params=given_params,
    )
    assert found.shape == (11, 16)
    assert torch.equal(found.view(11, 2, 8), world.run(world.module(), lengths, tensors)[0])
    assert not list(attention.parameters())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout must be 0, got 0.1"),
        ({"window_size": (4, 0)}, r"window_size must be None, got \(4, 0\)"),
        ({"softmax_type": "off-by-one"}, "softmax_type must be 'vanilla', got 'off-by-one'"),
        ({"softmax_type": "learnable"}, "softmax_type must be 'vanilla', got 'learnable'"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
        ({"qk_clip": True}, "qk_clip"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit"),
    ],
)
def test_settings_that_it_does_not_do_are_refused(fields, named):
    with pytest.raises(PackproofError, match=f"attention of layer 3: {named}"):
        built(megatron_config(**fields))


def test_other_attention_than_causal_self_attention_is_refused():
    from megatron.core.transformer.enums import AttnMaskType

    with pytest.raises(PackproofError, match="attention_type must be 'self', got 'cross'"):
        built(megatron_config(), attention_type="cross")
    with pytest.raises(PackproofError, match=r"attention_dropout must be 0, got 0\.2"):
        built(megatron_config(), attention_dropout=0.2)
    for mask_type in (AttnMaskType.padding, AttnMaskType.no_mask, AttnMaskType.arbitrary):
        with pytest.raises(PackproofError, match=f"attn_mask_type must be causal, got {mask_type.name}"):
            built(megatron_config(), attn_mask_type=mask_type)


def test_calls_that_do_not_fit_are_refused():
    attention, cu = world.module(), world.boundaries([4, 4])
    query, key, value, _ = world.inputs([4, 4], (4, 2, 8, 8), torch.float32, 0)
    fits = {"query": query, "key": key, "value": value, "attention_mask": None, "packed_seq_params": world.params(cu)}
    attention(**fits)
    falling = torch.tensor([0, 6, 4, 8], dtype=torch.int32)
    for change, named in (
        ({"packed_seq_params": None}, "no packed_seq_params"),
        ({"packed_seq_params": world.params(cu, qkv_format="sbhd")}, "qkv_format 'sbhd'"),
        ({"packed_seq_params": world.params(cu, local_cp_size=2)}, "local_cp_size and cp_group must not be set"),
        ({"packed_seq_params": world.params(cu, cu_seqlens_kv_padded=cu + 1)}, "cu_seqlens_kv must equal cu_seqlens_q"),
        ({"packed_seq_params": world.params(None)}, "cu_seqlens_q must be given"),
        (
            {"packed_seq_params": world.params(cu[:-1])},
            r"cu_seqlens must go from 0 to 8, the number of tokens, and never fall, got 0 4",
        ),
        ({"packed_seq_params": world.params(cu[1:])}, r"never fall, got 4 8"),
        ({"packed_seq_params": world.params(cu[:0])}, "cu_seqlens must go from 0 to 8"),
        ({"packed_seq_params": world.params(falling)}, "never fall, got 0 6 4 8"),
        ({"attention_mask": torch.ones(8, 8, dtype=torch.bool)}, "attention_mask must be None"),
        ({"attention_bias": torch.ones(8, 8)}, "attention_bias must be None"),
        ({"attn_mask_type": "padding"}, "attn_mask_type must be causal, got padding"),
        ({"query": query[:, :3]}, r"query \[8, 3, 8\]"),
        ({"query": query[:4]}, r"query \[4, 4, 8\]"),
        ({"query": query[:, None]}, "shapes must fit together"),
        ({"value": value[:, :1]}, "shapes must fit together"),
        ({"key": key.double()}, r"at least 16 bits, got torch\.float32, torch\.float64"),
        ({"query": query.int(), "key": key.int(), "value": value.int()}, r"at least 16 bits, got torch\.int32"),
    ):
        with pytest.raises(PackproofError, match=named):
            attention(**fits | change)


def test_without_a_collection_the_group_is_megatrons_own(monkeypatch):
    from megatron.core import parallel_state

    group = object()
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda of: {group: 2}[of])
    assert built(megatron_config(context_parallel_size=2), pg_collection=None).group is group
    assert built(megatron_config(), pg_collection=None).group is None


def test_the_fused_kernel_is_for_the_cpu():
    assert kernel_for(torch.device("cpu")) is FUSED_CPU
    assert kernel_for(torch.device("cuda")) is TILED


@pytest.mark.gpu
def test_attention_on_cuda_is_dense_attention():
    for dtype in world.DTYPES:
        lengths, heads = [3, 0, 530, 530, 700], (4, 2, 8, 4)
        tensors = world.inputs(lengths, heads, dtype, 5)
        found = world.run(world.module(), lengths, [each.cuda() for each in tensors])
        assert_exact([each.cpu() for each in found], lengths, tensors, 8**-0.5)


@pytest.mark.worlds
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gathered_rows_are_whole_and_have_the_gradient_that_was_named(ranks, layout):
    for cp, groups in world.GROUPS.items():
        total = 14 * cp
        values = torch.arange(3 * total, dtype=torch.float64).view(total, 3)
        cu = world.boundaries([2 * cp * unit for unit in (1, 0, 4, 2)])
        weights = [torch.cos(values + 10 * rank) for rank in range(cp)]
        for rank, member in ((rank, member) for group in groups for rank, member in enumerate(group)):
            index = shard_index(cu, rank, cp, layout=layout)
            whole, gradient, forward, backward = ranks[member][f"{cp} {layout} sum"]
            assert torch.equal(whole, values)
            torch.testing.assert_close(gradient, sum(weights)[index], rtol=0, atol=1e-14)
            assert (forward, backward) == (1, 1)
            whole, gradient, forward, backward = ranks[member][f"{cp} {layout} own"]
            assert torch.equal(whole, values)
            assert torch.equal(gradient, weights[0][index])
            assert (forward, backward) == (1, 0)


@pytest.mark.worlds
def test_tokens_may_lie_along_another_dimension_and_in_several_rows(ranks):
    for cp, groups in world.GROUPS.items():
        values = torch.arange(0, 3 * 14 * cp, 3, dtype=torch.float64)
        for member in (member for group in groups for member in group):
            whole, gradient, share = ranks[member][f"{cp} dim"]
            assert torch.equal(whole, torch.stack([values, -values]))
            assert torch.equal(gradient, 2 * share)
            assert torch.equal(ranks[member][f"{cp} rows"][0], torch.arange(28 * cp).view(2, -1))


@pytest.mark.worlds
def test_half_precision_is_added_in_float32(ranks):
    for results in ranks:
        assert results["half precision"][0].tolist() == [260.0, 260.0]  # 259, rounded once


def test_a_gather_refuses_unknown_settings_and_does_nothing_on_one_rank(monkeypatch):
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda of: {group: 1}[of])
    tensor, cu = torch.zeros(4), world.boundaries([4])
    assert gather_ranks(tensor, cu, group, gradient="sum") is tensor
    with pytest.raises(PackproofError, match="must be sum or own, got 'mean'"):
        gather_ranks(tensor, cu, group, gradient="mean")
    with pytest.raises(PackproofError, match="must be one of zigzag, contiguous, got 'zigzig'"):
        gather_ranks(tensor, cu, group, layout="zigzig", gradient="own")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_norm_is_the_root_mean_square_norm(zero_centered, dtype):
    config = megatron_config(layernorm_zero_centered_gamma=zero_centered)
    norm = RMSNorm(config=config, hidden_size=6, eps=1e-3).to(dtype)
    x = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    wide = x.double()
    plain = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x).double(), plain, rtol=4 * eps, atol=0)
    with torch.no_grad():
        norm.weight += torch.arange(6, dtype=dtype)
    torch.testing.assert_close(norm(x).double(), plain * torch.arange(1, 7), rtol=4 * eps, atol=0)
    assert norm(x).dtype == dtype


def test_the_norm_marks_its_weight_for_sequence_parallelism():
    config = megatron_config(tensor_model_parallel_size=2, sequence_parallel=True)
    assert RMSNorm(config=config, hidden_size=4, eps=1e-5).weight.sequence_parallel is True
    assert RMSNorm(config=megatron_config(), hidden_size=4, eps=1e-5).weight.sequence_parallel is False
    assert [name for name, _ in RMSNorm(config=config, hidden_size=4).named_parameters()] == ["weight"]


def test_the_norm_refuses_another_normalization():
    with pytest.raises(
        PackproofError, match="the config must ask for RMSNorm without Transformer Engine, got LayerNorm"
    ):
        RMSNorm(config=megatron_config(normalization="LayerNorm"), hidden_size=4)
    with pytest.raises(PackproofError, match="the call must ask for RMSNorm without Transformer Engine, got LayerNorm"):
        RMSNorm(config=megatron_config(), hidden_size=4, normalization="LayerNorm")
