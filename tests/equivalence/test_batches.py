"""R-BATCH-3 to R-BATCH-5: the stride, the validation padding and the divisor are equal on both sides, the stride Megatron-LM's too."""

import itertools
import warnings

import pytest

from equivalence.generators.tokenizers import load
from equivalence.subjects import RowSettings
from equivalence.subjects import load as load_subject
from production.rows import batch as production
from reference import batches as reference

SETTINGS = RowSettings(pack_length=4, prompt_format="identity")
PRODUCTION = load_subject("production")


def batch(count):
    """Rows that can be told apart: row i begins with word i."""
    rows = [
        PRODUCTION.build_row([{"role": "system", "content": f"w{number} w1"}], load("word"), SETTINGS)
        for number in range(count)
    ]
    return production.collate([vars_of(row) for row in rows])


def vars_of(row):
    names = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens", "max_seqlen")
    return {name: getattr(row, name) for name in names} | {"context_parallel_size": 1}


def rows_in(batch):
    return (batch.input_ids[:, 0] - 12).tolist()


@pytest.mark.parametrize(("count", "size"), [(1, 1), (6, 1), (6, 2), (6, 3), (12, 4)])
def test_r_batch_3_the_stride(count, size):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    whole = batch(count)
    for rank in range(size):
        sampler = MegatronPretrainingSampler(
            total_samples=count,
            consumed_samples=0,
            micro_batch_size=1,
            data_parallel_rank=rank,
            data_parallel_size=size,
        )
        taken = rows_in(production.take_rank(whole, rank=rank, size=size))
        assert taken == reference.rows_of_rank(range(count), rank, size) == list(itertools.chain(*sampler))


@pytest.mark.parametrize(("count", "size"), [(1, 4), (3, 2), (4, 2), (5, 4)])
def test_r_batch_4_and_5_validation_padding_and_divisor(count, size):
    whole = batch(count)
    padded = production.pad_validation(whole, size=size)
    rows, sample_mask = reference.pad_validation(range(count), size)
    assert rows_in(padded) == rows
    assert padded.sample_mask.tolist() == sample_mask
    assert float(production.count_trained(padded)) == reference.valid_tokens(padded.token_mask, padded.sample_mask)
    assert float(production.count_trained(padded)) == float(production.count_trained(whole)) > 0
