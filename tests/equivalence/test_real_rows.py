"""Real conversations with the real tokenizer of 131,072 ids, by all three witnesses, in every format."""

import json
from pathlib import Path

import pytest

from equivalence.checks.rows.rows import check_row
from equivalence.generators.tokenizers import load
from equivalence.subjects import BUILT_IN, PROMPT_FORMATS, RowSettings
from equivalence.subjects import load as load_subject

SAMPLE = Path(__file__).parents[2] / "examples" / "packed" / "sample.jsonl.packed"
ROWS = [json.loads(line)["messages"] for line in SAMPLE.read_text(encoding="utf-8").split("\n")[:-1]][::24]


@pytest.mark.parametrize("preset", ["megatron-lm-0.19", "megatron-lm-main", "strict"])
@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_real_rows_are_equal_on_every_side(prompt_format, preset):
    subjects = [load_subject(name) for name in BUILT_IN]
    built = 0
    for number, messages in enumerate(ROWS):
        settings = RowSettings(
            pack_length=2000, prompt_format=prompt_format, context_parallel_size=1 + number % 2, semantics=preset
        )
        result = check_row(messages, load("nemotron-like"), settings, subjects)
        assert result.findings == []
        assert len(result.rows) == (2 if preset == "strict" else 3)
        for row in result.rows.values():
            if row.refusal is None:
                assert int(row.input_ids.max()) > 100_000
                assert row.token_mask.sum() > 0
                built += 1
    # Contents of `identity` join without a separator, so real turns merge and its masked form refuses them.
    merges = prompt_format == "identity" and preset != "megatron-lm-0.19"
    assert (built == 0) is merges
