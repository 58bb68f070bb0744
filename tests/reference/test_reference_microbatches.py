"""The reference's online path, its chat tokens and where the paths meet, against values worked out by hand (docs/SPEC.md#online-path and #both-paths)."""

import pytest
import torch

from reference import chat, microbatches
from reference.batches import collate
from reference.prompts import Prompt
from reference.refusals import RowRefused
from reference.rows import Row

CONVERSATIONS = [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([6, 7, 8], [0, 1, 1]), ([9, 10], [1, 1])]
FOUR = microbatches.Padding(sequence_multiple=4, row_multiple=1, row_length=None)


def online(**options):
    return microbatches.process_microbatch(microbatches.padded_batch(CONVERSATIONS, 4), how=FOUR, **options)


def test_r_online_2_the_padded_batch_is_right_padded_to_a_multiple():
    found = microbatches.padded_batch(CONVERSATIONS, 4)
    assert found.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 0, 0, 0, 0, 0], [9, 10, 0, 0, 0, 0, 0, 0]]
    assert found.token_mask[1].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert found.input_lengths == [5, 3, 2]
    filled = microbatches.padded_batch(CONVERSATIONS, 4, pad_token_id=77)
    assert filled.input_ids[1].tolist() == [6, 7, 8, 77, 77, 77, 77, 77]
    assert microbatches.squeeze(filled, FOUR).input_ids.tolist()[8:12] == [6, 7, 8, 0]
    with pytest.raises(microbatches.PaddingError, match="must have a token"):
        microbatches.padded_batch([([], [])], 4)


def test_r_online_3_bins_are_packed_over_rounded_lengths():
    assert microbatches.bins([5, 3, 2], 4, 8, "concatenative", 1) == [[0], [1, 2]]
    assert microbatches.bins([5, 3, 2], 1, 8, "concatenative", 1) == [[0, 1], [2]]
    assert microbatches.bins([5, 3, 2], 4, 8, "concatenative", 3) == [[0], [1], [2]]


def test_r_online_4_the_published_example():
    row = online(rank=0, context_parallel_size=2).row
    assert (row.cu_seqlens, row.cu_seqlens_padded) == ([0, 5, 8, 10], [0, 8, 12, 16])
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 0, 9, 10, 0, 0]
    assert row.target_ids.tolist() == [2, 3, 4, 5, 0, 0, 0, 1, 7, 8, 0, 6, 10, 0, 0, 9]
    assert row.target_mask.tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert online(rank=0, context_parallel_size=2).input_ids.tolist() == [1, 2, 0, 0, 6, 0, 9, 0]
    assert online(rank=1, context_parallel_size=2).input_ids.tolist() == [3, 4, 5, 0, 7, 8, 10, 0]


def test_r_online_4_a_sequence_that_does_not_count_trains_nowhere():
    whole = microbatches.padded_batch(CONVERSATIONS, 4)
    whole.sample_mask[0] = 0
    assert microbatches.squeeze(whole, FOUR).target_mask.tolist() == [0] * 8 + [1, 1, 0, 0, 1, 0, 0, 0]
    assert microbatches.valid_tokens(whole) == 3
    whole.sample_mask[0] = 1
    assert microbatches.valid_tokens(whole) == 6  # [:, 1:] leaves the last conversation one of its two


@pytest.mark.parametrize(
    ("options", "multiple"),
    [
        ({}, 1),
        ({"precision": "fp8_blockwise"}, 128),
        ({"precision": "fp8_mxfp8"}, 32),
        ({"precision": "fp8_other"}, 16),
        ({"hybrid_expert_parallel": True, "precision": "fp8_other"}, 128),
        ({"precision": "fp8_other", "context_parallel_size": 2}, 64),
        ({"precision": "fp8_other", "context_parallel_size": 2, "sequence_parallel": True}, 128),
    ],
)
def test_r_online_5_the_length_to_which_a_whole_row_is_padded(options, multiple):
    given = {
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "precision": "unquantized",
        "hybrid_expert_parallel": False,
    } | options
    found = microbatches.padding(multiple=8, tensor_parallel_size=2, pipeline_parallel_size=1, longest_bin=20, **given)
    assert (found.row_multiple, found.row_length) == (multiple, None)
    staged = microbatches.padding(multiple=8, tensor_parallel_size=2, pipeline_parallel_size=2, longest_bin=20, **given)
    assert staged.row_length == microbatches.round_up(20, multiple)


def test_r_online_4_a_multiple_that_the_domain_factor_does_not_divide_is_an_error():
    with pytest.raises(microbatches.PaddingError, match="must be a multiple of 4, got 6"):
        microbatches.padding(
            multiple=6,
            context_parallel_size=2,
            tensor_parallel_size=1,
            sequence_parallel=False,
            pipeline_parallel_size=1,
            precision="unquantized",
            hybrid_expert_parallel=False,
            longest_bin=6,
        )


def test_r_online_5_the_last_sequence_takes_the_rows_padding():
    whole = microbatches.padded_batch(CONVERSATIONS, 4)
    how = microbatches.Padding(sequence_multiple=4, row_multiple=1, row_length=24)
    assert microbatches.squeeze(whole, how).cu_seqlens_padded == [0, 8, 12, 24]
    how = microbatches.Padding(sequence_multiple=4, row_multiple=10, row_length=None)
    assert microbatches.squeeze(whole, how).cu_seqlens_padded == [0, 8, 12, 20]
    how = microbatches.Padding(sequence_multiple=4, row_multiple=1, row_length=12)
    with pytest.raises(microbatches.PaddingError, match="at least the 16 tokens of the bin, got 12"):
        microbatches.squeeze(whole, how)


def test_r_online_7_and_r_meet_2_labels_stay_outside_but_for_the_mask_of_multi_token_prediction():
    found = online(rank=0, context_parallel_size=2)
    assert (found.labels, found.loss_mask, found.position_ids, found.total_tokens) == (None, None, None, 8)
    deep = online(rank=0, context_parallel_size=2, depths=1)
    assert deep.labels is None
    assert deep.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]  # of the tokens 1 2 _ _ 6 _ 9 _
    assert (deep.position_ids, deep.depths[0].position_ids, deep.total_tokens) == (None, None, 8)
    assert found.depths == []


def test_r_online_7_a_depth_has_the_id_that_is_further_on_and_that_ids_mask():
    first, second = online(rank=0, context_parallel_size=1, depths=2).depths
    assert first.target_ids.tolist() == [3, 4, 5, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]
    assert first.token_mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert first.input_ids.tolist() == [2, 3, 4, 5, 0, 0, 0, 0, 7, 8, 0, 0, 10, 0, 0, 0]
    assert second.target_ids.tolist() == [4, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert second.token_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert online(rank=1, context_parallel_size=2, depths=1).depths[0].target_ids.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]


def test_r_meet_1_stored_boundaries_are_reused_and_a_filling_row_counts_nowhere():
    def row(first):
        return Row(
            input_ids=torch.arange(first, first + 4),
            target_ids=torch.arange(first + 1, first + 5),
            token_mask=torch.tensor([1.0, 1.0, 0.0, 1.0]),
            position_ids=torch.tensor([0, 1, 0, 1]),
            cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
            max_seqlen=2,
            report={},
            segments=[],
            is_padding=[],
        )

    batch = collate([row(10), row(20)])
    batch.sample_mask[1] = 0
    found = microbatches.process_microbatch(batch, rank=0, context_parallel_size=1, depths=1)
    assert found.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert found.loss_mask.tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert (found.cu_seqlens, found.max_seqlen, found.total_tokens) == ([0, 2, 4, 6, 8], 2, 8)
    assert found.depths[0].token_mask.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert found.labels.tolist() == found.target_ids.tolist() == [11, 12, 13, 14, 21, 22, 23, 24]


class Letters:
    """A tokenizer whose tokens are characters."""

    unk_id = pad_id = eos_id = None

    def encode(self, text):
        return [ord(character) for character in text]

    closes = True
    renders_tools = True

    def render(self, conversation, *, tools=None, add_generation_prompt=False):
        """A template that may close what it has rendered so far, so that the next message takes the end away again."""
        head = f"[{tools}]" if tools and self.renders_tools else ""
        calls = [f"{message['tool_calls']}" if message.get("tool_calls") else "" for message in conversation]
        texts = [f"<{message['content']}{call}>" for message, call in zip(conversation, calls, strict=True)]
        return head + "".join(texts) + "A:" * add_generation_prompt + "!" * self.closes

    def token_to_id(self, _):
        return None


def test_r_online_1_each_message_is_encoded_from_where_the_rendered_text_differs():
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "Assistant", "content": "d"},
    ]
    identity = Prompt(format="identity")
    assert tokenized(conversation, identity) == ("abcd", [0, 1, 1, 0])
    assert tokenized(conversation, identity, bos_token="^", eos_token="$") == ("^abcd$", [0, 0, 1, 1, 0, 0])
    # "<a>!" and then "<bc>!" where "!" stood: nothing takes it back.
    allowed = {"bos_token": "<", "eos_token": "!", "on_unjoined_pieces": "allow"}
    assert tokenized(conversation, OWN, **allowed) == ("<a>!<bc>!<d>!", [0] * 4 + [1] * 5 + [0] * 4)


OWN = Prompt(format="default")


def tokenized(conversation, prompt, tools=None, tokenizer=None, **settings):
    given = chat.ChatSettings(**settings)
    tokens, mask = chat.joined(chat.tokenize_messages(conversation, prompt, tokenizer or Letters(), given, tools))
    return "".join(map(chr, tokens)), mask


def test_r_online_1_a_template_may_open_the_assistants_turn_behind_a_prompt():
    opening = Letters()
    opening.closes = False
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenized(conversation, OWN, tokenizer=opening) == ("<a><b>", [0, 0, 0, 1, 1, 1])
    with pytest.raises(RowRefused) as refused:  # this template's answers do not begin with what it opens
        tokenized(conversation, OWN, tokenizer=opening, add_generation_prompt=True)
    assert (refused.value.kind, refused.value.turn) == ("unjoined_pieces", 1)
    opened = [{"role": "tool", "content": "a"}]
    assert tokenized(opened, OWN, tokenizer=opening, add_generation_prompt=True) == ("<a>A:", [0] * 5)
    assert (
        tokenized([{"role": "system", "content": "a"}], OWN, tokenizer=opening, add_generation_prompt=True)[0] == "<a>"
    )


def test_r_online_9_pieces_that_do_not_join_are_refused():
    with pytest.raises(RowRefused) as refused:
        tokenized([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], OWN)
    assert (refused.value.kind, refused.value.turn) == ("unjoined_pieces", 1)


def test_r_online_10_tools_are_rendered_or_refused():
    joining = Letters()
    joining.closes = False
    calls = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": ["f"]}]
    assert tokenized(calls, OWN, "T", joining)[0] == "[T]<a><['f']>"
    for conversation, prompt, tools in (
        (calls, Prompt(format="identity"), None),
        (calls[:1], Prompt(format="identity"), "T"),
    ):
        with pytest.raises(RowRefused) as refused:
            tokenized(conversation, prompt, tools)
        assert refused.value.kind == "tools_not_rendered"
    joining.renders_tools = False
    with pytest.raises(RowRefused, match="does not render the tools"):
        tokenized(calls, OWN, "T", joining)


def test_r_online_8_a_conversation_of_the_longest_length_is_cut_to_a_stub():
    pieces = [
        chat.MessageTokens(tokens=[1, 2, 3, 4, 5], is_trained=False),
        chat.MessageTokens(tokens=[6, 7, 8], is_trained=True),
    ]
    assert chat.weighted(pieces, 9) == ([1, 2, 3, 4, 5, 6, 7, 8], [0] * 5 + [1] * 3, 1.0)
    assert chat.weighted(pieces, 8) == ([1, 2, 3, 4, 6, 7, 8], [0] * 4 + [1] * 3, 0.0)  # min(4, 8 // 2)
    assert chat.weighted(pieces, 5) == ([1, 2, 6, 7], [0, 0, 1, 1], 0.0)
    assert chat.weighted(pieces, 1) == ([], [], 0.0)
