"""Batches (docs/SPEC.md#batch): collate, flatten, stride, validation padding, divisor, and a refusal of each kind (R-GUARD-1)."""

import dataclasses
import itertools

import pytest
import torch

from production.errors import BatchRefused, PackproofError
from production.rows import batch as batches
from production.rows.batch import (
    BatchSettings,
    collate,
    collate_checked,
    count_trained,
    flatten,
    pad_validation,
    take_rank,
)
from production.rows.builder import Row
from production.rows.guards import FIELDS, check_rows

PAD = 0


def row(*bounds, cp=1, seed=0, **changes):
    """A row with these boundaries, its tokens counting up from 100·seed + 1, the last of each segment not trained."""
    length = bounds[-1]
    targets = torch.arange(length) + 100 * seed + 2
    targets[torch.tensor([bound - 1 for bound in bounds if bound])] = -100
    fields = {
        "input_ids": torch.arange(length) + 100 * seed + 1,
        "target_ids": targets,
        "token_mask": (targets != -100).float(),
        "position_ids": torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(bounds)]),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "max_seqlen": max(end - start for start, end in itertools.pairwise(bounds)),
        "context_parallel_size": cp,
        "report": {},
    }
    return Row(**(fields | changes))


def sample(of, **changes):
    """The same as a mapping, some fields changed, those set to None left out."""
    fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)} | changes
    return {name: value for name, value in fields.items() if value is not None}


def job(**changes):
    defaults = {"context_parallel_size": 1, "data_parallel_size": 1, "global_batch_size": None}
    return BatchSettings(**(defaults | changes))


ROWS = [row(0, 4, 10, seed=1), row(0, 10, seed=2), row(0, 2, 3, 10, seed=3), row(0, 7, 10, seed=4)]


def test_collate_stacks_rows_with_ragged_boundaries():
    """R-BATCH-1"""
    batch = collate_checked(ROWS, job())
    assert (
        batch.input_ids.shape == batch.target_ids.shape == batch.token_mask.shape == batch.position_ids.shape == (4, 10)
    )
    assert torch.equal(batch.input_ids[2], ROWS[2].input_ids)
    assert batch.packed_cu_seqlens.tolist() == [[0, 4, 10, -1], [0, 10, -1, -1], [0, 2, 3, 10], [0, 7, 10, -1]]
    assert batch.packed_cu_seqlens_lengths.tolist() == [3, 2, 4, 3]
    assert batch.packed_max_seqlen.tolist() == [6, 10, 7, 7]
    assert batch.input_lengths.tolist() == [10] * 4
    assert batch.sample_mask.tolist() == [1.0] * 4
    dtypes = {field.name: getattr(batch, field.name).dtype for field in dataclasses.fields(batch)}
    assert dtypes == {
        "input_ids": torch.int64,
        "target_ids": torch.int64,
        "token_mask": torch.float32,
        "position_ids": torch.int64,
        "packed_cu_seqlens": torch.int32,
        "packed_cu_seqlens_lengths": torch.int64,
        "packed_max_seqlen": torch.int64,
        "input_lengths": torch.int64,
        "sample_mask": torch.float32,
    }


def test_rows_may_come_as_mappings():
    rows = [sample(ROWS[0]), sample(ROWS[1], max_seqlen=torch.tensor(10), report=None)]
    batch = collate_checked(rows, job())
    assert torch.equal(batch.packed_cu_seqlens, collate(ROWS[:2]).packed_cu_seqlens)


def test_flatten_joins_boundaries_without_the_seam():
    """R-BATCH-2"""
    flat = flatten(collate(ROWS))
    assert flat.cu_seqlens.tolist() == [0, 4, 10, 20, 22, 23, 30, 37, 40]
    assert flat.cu_seqlens.dtype == torch.int32
    assert flat.max_seqlen == 10
    assert torch.equal(flat.input_ids, torch.cat([one.input_ids for one in ROWS])[None])
    assert flat.token_mask.shape == flat.target_ids.shape == flat.position_ids.shape == (1, 40)


def test_empty_segments_are_collated_and_flattened_and_refused_for_training():
    """R-GUARD-1, last sentence; a leading empty segment of a later row stays, as Megatron-LM's merge leaves it."""
    rows = [row(0, 4, 4, 10), row(0, 0, 10)]
    assert flatten(collate(rows)).cu_seqlens.tolist() == [0, 4, 4, 10, 10, 20]
    for one in rows:
        with pytest.raises(BatchRefused) as error:
            collate_checked([one], job())
        assert error.value.kind == "cu_order"


def test_flatten_is_megatron_lms():
    """R-BATCH-2, the installed package as witness"""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.utils import flatten_batch_for_packed_sequences
    rows = [row(0, 4, 4, 10), row(0, 0, 10), row(0, 10), row(0, 1, 2, 3, 10)]
    filled = torch.full((4, 11), 10, dtype=torch.int32)
    for index, one in enumerate(rows):
        filled[index, : len(one.cu_seqlens)] = one.cu_seqlens
    batch = {
        "tokens": torch.stack([one.input_ids for one in rows]),
        "cu_seqlens": filled,
        "max_seqlen": torch.tensor([one.max_seqlen for one in rows]),
    }
    expected = flatten_batch_for_packed_sequences(batch)
    flat = flatten(collate(rows))
    assert flat.cu_seqlens.tolist() == expected["cu_seqlens"].squeeze(0).tolist()
    assert flat.max_seqlen == int(expected["max_seqlen"])
    assert torch.equal(flat.input_ids, expected["tokens"])


def test_a_rank_takes_every_dp_th_row():
    """R-BATCH-3"""
    batch = collate(ROWS)
    for rank in (0, 1):
        taken = take_rank(batch, rank=rank, size=2)
        assert torch.equal(taken.input_ids, batch.input_ids[[rank, rank + 2]])
        assert torch.equal(taken.packed_max_seqlen, batch.packed_max_seqlen[[rank, rank + 2]])
        assert taken.sample_mask.shape == (2,)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        take_rank(batch, rank=2, size=2)
    with pytest.raises(ValueError, match="pad_validation"):
        take_rank(batch, rank=0, size=3)


def test_validation_is_padded_by_its_last_row_before_it_is_sharded():
    """R-BATCH-4"""
    batch = pad_validation(collate(ROWS[:3]), size=4)
    assert batch.sample_mask.tolist() == [1, 1, 1, 0]
    assert torch.equal(batch.input_ids[3], ROWS[2].input_ids)
    assert batch.packed_cu_seqlens[3].tolist() == [0, 2, 3, 10]
    assert [field.name for field in dataclasses.fields(batch) if len(getattr(batch, field.name)) != 4] == []
    assert pad_validation(batch, size=2) is batch
    assert pad_validation(collate(ROWS[:1]), size=4).sample_mask.tolist() == [1, 0, 0, 0]


def test_the_divisor_counts_trained_tokens_of_real_rows():
    """R-BATCH-5"""
    batch = collate(ROWS[:3])
    assert count_trained(batch).item() == 8 + 9 + 7
    assert count_trained(pad_validation(batch, size=8)).item() == 24
    parts = [count_trained(take_rank(pad_validation(batch, size=2), rank=rank, size=2)) for rank in (0, 1)]
    assert sum(parts).item() == 24
    # float32 would lose the last one: 2**24 + 1
    large = dataclasses.replace(
        collate([row(0, 1)]), token_mask=torch.ones(1, 2**24 + 1, dtype=torch.float32), sample_mask=torch.ones(1)
    )
    assert count_trained(large).item() == 2**24 + 1


def not_packed(of):
    return sample(of, cu_seqlens=None, max_seqlen=None)


GOOD = row(0, 4, 8)
MTP = {"multi_token_prediction": True, "pad_token_id": PAD}
GUARDS = [
    # kind, row at fault, rows, settings
    ("mixed_rows", 1, [GOOD, not_packed(GOOD)], {}),
    ("mixed_rows", 1, [not_packed(GOOD), GOOD], {}),
    ("missing_field", 0, [not_packed(GOOD), not_packed(GOOD)], {}),
    *(("missing_field", 1, [GOOD, sample(GOOD, **{name: None})], {}) for name in FIELDS),
    ("field_shape", 1, [GOOD, sample(GOOD, extra=1)], {}),
    ("field_shape", 0, [sample(GOOD, token_mask=torch.ones(7))], {}),
    ("field_shape", 0, [sample(GOOD, target_ids=torch.ones(1, 8, dtype=torch.int64))], {}),
    ("field_shape", 0, [sample(GOOD, cu_seqlens=torch.empty(0, dtype=torch.int32))], {}),
    ("field_shape", 0, [sample(GOOD, max_seqlen=torch.tensor([4, 4]))], {}),
    ("field_shape", 0, [sample(GOOD, input_ids=torch.empty(8, dtype=torch.int64, device="meta"))], {}),
    ("field_dtype", 0, [sample(GOOD, input_ids=list(range(8)))], {}),
    ("field_dtype", 1, [GOOD, sample(GOOD, input_ids=torch.ones(8, dtype=torch.int32))], {}),
    ("field_dtype", 0, [sample(GOOD, token_mask=torch.ones(8, dtype=torch.bool))], {}),
    ("field_dtype", 0, [sample(GOOD, cu_seqlens=torch.tensor([0, 4, 8]))], {}),
    ("field_dtype", 0, [sample(GOOD, max_seqlen=4.0)], {}),
    ("field_dtype", 0, [sample(GOOD, max_seqlen=True)], {}),
    ("field_dtype", 0, [sample(GOOD, max_seqlen=torch.tensor(4.0))], {}),
    ("unequal_lengths", 2, [GOOD, GOOD, row(0, 4, 9)], {}),
    ("cu_start", 1, [GOOD, sample(GOOD, cu_seqlens=torch.tensor([1, 4, 8], dtype=torch.int32))], {}),
    ("cu_order", 0, [row(0, 4, 4, 8)], {}),
    ("cu_order", 1, [GOOD, sample(GOOD, cu_seqlens=torch.tensor([0, 5, 4, 8], dtype=torch.int32))], {}),
    ("cu_order", 1, [GOOD, sample(GOOD, cu_seqlens=torch.tensor([0, 8, -1], dtype=torch.int32))], {}),
    ("cu_end", 1, [GOOD, sample(GOOD, cu_seqlens=torch.tensor([0, 4, 7], dtype=torch.int32))], {}),
    ("cu_end", 0, [sample(GOOD, cu_seqlens=torch.tensor([0], dtype=torch.int32))], {}),
    ("cu_end", 0, [sample(GOOD, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))], {}),
    ("max_seqlen", 1, [GOOD, sample(GOOD, max_seqlen=8)], {}),
    ("max_seqlen", 0, [sample(GOOD, max_seqlen=3), GOOD], {}),
    ("context_parallel_size", 1, [row(0, 4, 8, cp=2), GOOD], {"context_parallel_size": 2}),
    ("indivisible_segment", 1, [row(0, 4, 8, cp=2), row(0, 2, 8, cp=2)], {"context_parallel_size": 2}),
    ("global_batch_size", None, [GOOD], {"global_batch_size": 2}),
    ("global_batch_size", None, [], {}),
    ("data_parallel_size", None, [GOOD] * 3, {"global_batch_size": 3, "data_parallel_size": 2}),
    ("target_mask", 1, [GOOD, sample(GOOD, token_mask=GOOD.token_mask.roll(1))], MTP),
    ("target_mask", 0, [sample(GOOD, token_mask=torch.ones(8))], MTP),
    ("target_mask", 0, [sample(GOOD, token_mask=torch.zeros(8))], MTP),
    ("target_mask", 0, [sample(GOOD, token_mask=GOOD.token_mask * 0.5)], MTP),
]


@pytest.mark.parametrize(("kind", "at", "rows", "changes"), GUARDS)
def test_guards(kind, at, rows, changes):
    """R-GUARD-1: each kind, with row, what and fix"""
    with pytest.raises(BatchRefused) as error:
        collate_checked(rows, job(**changes))
    assert (error.value.kind, error.value.row) == (kind, at)
    assert error.value.what
    assert error.value.fix
    if at is not None:
        assert f"row {at}" in str(error.value)


def test_every_kind_of_spec_has_a_case():
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "docs" / "SPEC.md").read_text(encoding="utf-8")
    import re

    rule = text[text.index("**R-GUARD-1**") : text.index("\n## Microbatch")]
    kinds = re.findall(r"^\| `(\w+)` \|", rule, re.MULTILINE)
    assert len(kinds) == len(set(kinds)) > 10
    assert set(kinds) == {kind for kind, *_ in GUARDS}


def test_good_rows_pass_all_guards():
    trained_pad = sample(GOOD, target_ids=torch.full((8,), PAD), token_mask=torch.zeros(8))
    check_rows([GOOD, trained_pad], job(global_batch_size=2, data_parallel_size=2, **MTP))
    check_rows([row(0, 4, 8, cp=2)], job(context_parallel_size=2))
    check_rows([GOOD] * 3, job(data_parallel_size=2))


def test_guards_come_before_any_copy(monkeypatch):
    """R-GUARD-1: nothing is stacked, padded or moved before a row is refused."""

    def copied(*_, **__):
        raise AssertionError

    monkeypatch.setattr(batches, "collate", copied)
    monkeypatch.setattr(torch, "stack", copied)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    with pytest.raises(BatchRefused):
        collate_checked([row(0, 4, 4, 8)], job())


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel_size": 0},
        {"data_parallel_size": -1},
        {"global_batch_size": 0},
        {"multi_token_prediction": True},
    ],
)
def test_settings_that_no_batch_could_satisfy_are_errors(changes):
    with pytest.raises(PackproofError):
        job(**changes)
