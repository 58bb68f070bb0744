"""Rows of more tokens than 16 bits count, and global batches of more than float32 counts: no draw of a run is as long."""

from types import SimpleNamespace

import pytest
import torch

from equivalence.checks.cuts.context_parallel import check_context_parallel
from equivalence.checks.cuts.multi_token import check_multi_token
from equivalence.checks.rows.batches import check_batch
from equivalence.checks.rows.rows import check_row
from equivalence.generators.tokenizers import load
from equivalence.subjects import BUILT_IN, RowSettings
from equivalence.subjects import load as load_subject

LONG = 70_000
"""Tokens of a segment, more than 2**16."""
PACK_LENGTH = 140_000
"""More than 2**17: whole rows and the place of the second segment need 18 bits."""


def conversation(words):
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": "w1 "},
        {"role": "assistant", "content": "w2 w3 " * (words // 2)},
    ]


def built(messages, cp):
    """The row of every side that builds it, which are equal."""
    subjects = [load_subject(name) for name in BUILT_IN]
    settings = RowSettings(
        pack_length=PACK_LENGTH,
        prompt_format="nemotron-nano-v2",
        context_parallel_size=cp,
        semantics="megatron-lm-0.19",
    )
    result = check_row(messages, load("word"), settings, subjects)
    assert result.findings == []
    assert len(result.rows) == 3
    return result.rows, settings, subjects


@pytest.mark.parametrize("cp", [1, 2])
def test_a_segment_and_a_row_beyond_16_bits_are_built_collated_cut_and_shifted_alike(cp):
    rows, settings, subjects = built([*conversation(LONG), *conversation(LONG // 2), *conversation(8)], cp)
    row = rows["production"]
    assert int(row.max_seqlen) >= LONG
    assert int(row.position_ids.max()) >= LONG - 1
    assert int(row.token_mask.sum()) > 1 << 16
    others = built([*conversation(40), *conversation(LONG + 4)], cp)[0]
    result = check_batch([rows, others], settings, subjects)
    assert result.findings == []
    assert result.sides == 3
    tensors = {name: getattr(row, name) for name in ("input_ids", "target_ids", "token_mask", "position_ids")}
    # Of the row as it is at cp 1, whose segments no number of ranks need divide.
    if cp > 1:
        bounds = row.cu_seqlens.tolist()
        assert check_context_parallel(tensors, bounds, cp).findings == []
        assert check_multi_token(tensors, bounds, cp, 2).findings == []


@pytest.mark.parametrize("normalization", ["per_token", "mean_of_means"])
@pytest.mark.parametrize("trained", [(1 << 15) - 1, 1 << 15, 1 << 16, PACK_LENGTH])
def test_a_share_with_more_targets_than_16_bits_count_gives_their_number(normalization, trained):
    from production.loss import LossSettings, direct_loss

    settings = LossSettings(normalization=normalization, num_microbatches=1, context_parallel_size=1)
    mask = (torch.arange(PACK_LENGTH) < trained).float()[None]
    total, count, report = direct_loss(torch.ones(1, PACK_LENGTH), target_mask=mask, settings=settings)
    assert (float(total), int(count), report["lm loss"].tolist()) == (trained, trained, [trained, trained])


def test_r_batch_5_the_divisor_of_more_targets_than_float32_counts_is_rounded_once(monkeypatch):
    """Sums of drawn counts: added up in float32, one in four of them is another number."""
    from production.rows.batch import Batch
    from production.training import step

    monkeypatch.setattr(step, "distributed", SimpleNamespace(all_reduce=lambda total, group: None))  # noqa: ARG005
    monkeypatch.setattr(step, "parallel_state", SimpleNamespace(get_data_parallel_group=lambda: None))
    monkeypatch.setattr(step, "count_trained", lambda batch: batch.token_mask.sum(dtype=torch.float64))
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        counts = torch.randint(100_000, 262_144, (128,), generator=draw).tolist()
        batches = [object.__new__(Batch) for _ in counts]
        for batch, count in zip(batches, counts, strict=True):
            object.__setattr__(batch, "token_mask", torch.tensor(float(count)))
        found = step.count_valid(batches, torch.device("cpu"))
        assert found.dtype == torch.float32
        assert float(found) == float(torch.tensor(sum(counts), dtype=torch.float64).float())
