"""What NeMo-RL's own code made of conversations, recorded: both sides must make the same tokens, masks and weights (R-ONLINE-1, 2, 8, 10)."""

import json
from pathlib import Path

import pytest

from equivalence.generators import tokenizers
from equivalence.subjects.reference import TransformersTokenizer
from production.online import chat, padded_batch
from reference import chat as reference_chat
from reference import microbatches as reference
from reference.prompts import Prompt

LINES = (Path(__file__).parent / "nemo_rl_conversations.jsonl").read_text().splitlines()
CASES = [json.loads(line) for line in LINES[1:]]
MULTIPLE, PAD = 8, 77


@pytest.fixture
def tokenizer_of():
    """The word tokenizer as a case had it, put back afterwards."""
    tokenizer = tokenizers.load("word")
    kept = tokenizer.chat_template, tokenizer.bos_token

    def given(case):
        tokenizer.chat_template = case["template"]
        tokenizer.bos_token = None if case["without_bos_token"] else kept[1]
        return tokenizer

    yield given
    tokenizer.chat_template, tokenizer.bos_token = kept


def production(case, tokenizer):
    settings = chat.ChatSettings(
        add_bos=case["add_bos"],
        add_eos=case["add_eos"],
        add_generation_prompt=case["add_generation_prompt"],
        on_unjoined_pieces="allow",
        max_length=case["max_length"],
    )
    line = chat.Chat(messages=case["messages"], tools=case["tools"])
    (made,) = chat.ChatTokenizer(tokenizer=tokenizer, settings=settings).tokenize([line])
    if not len(made.token_ids):
        return None
    whole = padded_batch.build_rectangle([made], make_sequence_length_divisible_by=MULTIPLE, pad_token_id=PAD)
    return (
        whole.input_ids[0].tolist(),
        whole.token_mask[0].tolist(),
        whole.input_lengths.tolist(),
        whole.sample_mask.tolist(),
    )


def of_the_reference(case, tokenizer):
    settings = reference_chat.ChatSettings(
        bos_token=tokenizer.bos_token if case["add_bos"] else None,
        eos_token=tokenizer.eos_token if case["add_eos"] else None,
        add_generation_prompt=case["add_generation_prompt"],
        on_unjoined_pieces="allow",
    )
    pieces = reference_chat.tokenize_messages(
        case["messages"], Prompt(format="default"), TransformersTokenizer(tokenizer), settings, case["tools"]
    )
    tokens, mask, weight = reference_chat.weighted(pieces, case["max_length"])
    if not tokens:
        return None
    whole = reference.rectangle([(tokens, mask)], MULTIPLE, PAD)
    return whole.input_ids[0].tolist(), whole.token_mask[0].tolist(), whole.input_lengths, [weight]


@pytest.mark.parametrize("side", [production, of_the_reference])
def test_r_online_conversations_are_those_of_nemo_rls_own_code(side, tokenizer_of):
    for number, case in enumerate(CASES):
        expected = (case["input_ids"], case["token_mask"], [case["input_length"]], [case["weight"]])
        # A conversation of which nothing is left is none here; NeMo-RL goes on with a sequence of no token.
        assert side(case, tokenizer_of(case)) == (expected if case["input_length"] else None), number
    assert {case["weight"] for case in CASES} == {0.0, 1.0}
    assert len({case["template"] for case in CASES}) == 6
