"""The reference against right values worked out by hand: docs/SPEC.md#input, #row and #report, with no other side at hand."""

import itertools

import pytest
import torch

from reference import batches, prompts
from reference.prompts import Prompt
from reference.refusals import RowRefused
from reference.rows import RowSettings, build_row
from reference.semantics import semantics

MAIN = "megatron-lm-main"
_ = -100


class Words:
    """Words w0… are 12…, anything unknown is 0; nothing between words counts."""

    unk_id = 0
    pad_id = None
    eos_id = 2

    def encode(self, text):
        return [int(word[1:]) + 12 if word[1:].isdigit() and word[0] == "w" else 0 for word in text.split()]

    def render(self, conversation):
        return " ".join(message["content"] for message in conversation)

    def token_to_id(self, token):
        return {"<unk>": 0, "</s>": 2}.get(token)


def row(messages, pack_length, name="megatron-lm-0.19", cp=1, **prompt):
    prompt.setdefault("format", "identity")
    settings = RowSettings(
        prompt=Prompt(**prompt), pack_length=pack_length, context_parallel_size=cp, semantics=semantics(name)
    )
    return build_row(messages, Words(), settings)


def talk(*contents):
    return [
        {"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), contents, strict=False)
    ]


M = talk("w0 ", "w1 ", "w2 w3 ")
EMPTY = talk("")

# messages, P, input_ids, target_ids, mask, cu, hidden segments: the table of the format `identity` with masked prompts.
TABLE = {
    "one conversation fills the row": (M, 4, [12, 13, 14, 15], [_, 14, 15, 0], "0110", [0, 4], 0),
    "truncation loses the last label": (M, 3, [12, 13, 14], [_, 14, 0], "010", [0, 3], 0),
    "tail padding joins the last segment": (
        M + M, 10, [12, 13, 14, 15, 12, 13, 14, 15, 0, 0], [_, 14, 15, _, _, 14, 15, 0, 0, 0], "0110011000", [0, 4, 10], 0,
    ),
    "a conversation after an exact fill is hidden": (
        M + M + M, 8, [12, 13, 14, 15] * 2, [_, 14, 15, _, _, 14, 15, 0], "01100110", [0, 4, 8], 1,
    ),
    "an empty conversation first": (EMPTY + M, 6, [12, 13, 14, 15, 0, 0], [_, 14, 15, 0, 0, 0], "011000", [0, 0, 6], 0),
    "an empty conversation in the middle": (
        M + EMPTY + M, 10, [12, 13, 14, 15, 12, 13, 14, 15, 0, 0], [_, 14, 15, _, _, 14, 15, 0, 0, 0], "0110011000", [0, 4, 4, 10], 0,
    ),
    "an empty conversation last takes the padding": (
        M + EMPTY, 6, [12, 13, 14, 15, 0, 0], [_, 14, 15, 0, 0, 0], "011000", [0, 4, 6], 0,
    ),
    "an unknown word is the pad id, and masked by value": (
        talk("w0 ", "w1 ", "w2 zzz w3"), 8, [12, 13, 14, 0, 15, 0, 0, 0], [_, 14, 0, 15, 0, 0, 0, 0], "01010000", [0, 8], 0,
    ),
    "a label that trains across the boundary": (
        M + talk("", "", "w5 w6"), 8, [12, 13, 14, 15, 17, 18, 0, 0], [_, 14, 15, 17, 18, 0, 0, 0], "01111000", [0, 4, 8], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_r_layout_the_table_of_identity(name):
    messages, pack_length, input_ids, target_ids, mask, cu, hidden = TABLE[name]
    built = row(messages, pack_length, MAIN)
    assert built.input_ids.tolist() == input_ids
    assert built.target_ids.tolist() == target_ids
    assert "".join(str(int(value)) for value in built.token_mask) == mask
    assert built.cu_seqlens.tolist() == cu
    assert built.report["hidden_segments"] == hidden
    assert built.max_seqlen == max(b - a for a, b in itertools.pairwise(cu))


def test_r_target_1_identity_trains_its_prompt_in_0_19():
    built = row(M, 4)
    assert built.target_ids.tolist() == [13, 14, 15, 0]
    assert built.token_mask.tolist() == [1, 1, 1, 0]


def test_r_layout_6_positions_do_not_restart_in_an_empty_last_segment():
    assert row(M + EMPTY, 6, MAIN).position_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert row(M + M, 10, MAIN).position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


def test_r_layout_2_context_parallel_padding_and_its_boundary_label():
    two = talk("w0 ", "w1 ", "w2 ") * 2
    built = row(two, 16, cp=2)
    assert built.input_ids.tolist()[:9] == [12, 13, 14, 0, 12, 13, 14, 0, 0]
    assert built.cu_seqlens.tolist() == [0, 4, 16]
    assert built.position_ids.tolist()[:8] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert built.token_mask.tolist()[:8] == [1, 1, 0, 1, 1, 1, 0, 0]  # the pad at 3 trains on w0
    assert built.report["boundary_labels"] == 1
    assert row(two, 16).token_mask.tolist()[:6] == [1, 1, 1, 1, 1, 0]


def test_r_layout_3_a_last_segment_that_is_not_divisible_passes_unless_asked():
    three = talk("w0 ", "w1 ", "w2 ") * 3
    assert row(three, 10, cp=2).cu_seqlens.tolist() == [0, 4, 8, 10]
    with pytest.raises(RowRefused) as refused:
        row(three, 10, "megatron-lm-0.19,indivisible_segment=refuse", cp=2)
    assert (refused.value.kind, refused.value.conversation) == ("indivisible_segment", 2)


def test_r_layout_3_a_fault_in_a_conversation_that_does_not_fit_never_surfaces():
    bad = talk("w0 ", "w1 ", "")
    long = talk("w0 ", "w1 ", "w2 w3 w4")
    assert row(long + bad, 4, MAIN).report["dropped"] == 1
    with pytest.raises(RowRefused, match="empty_assistant: conversation 1, turn 2"):
        row(M + bad, 4, MAIN)  # an exact fill goes on, and finds it
    assert row(M + bad, 4, f"{MAIN},exact_fill=stop").report["dropped"] == 1


def test_r_layout_7_more_boundaries_than_the_row_has_room_for():
    three = [{"role": "system", "content": "w0"}] * 3
    with pytest.raises(RowRefused) as refused:
        row(three, 2)
    assert refused.value.kind == "too_many_boundaries"
    empty = [{"role": "system", "content": "w0"}, *EMPTY * 3]
    built = row(empty, 2, "megatron-lm-0.19,boundaries_beyond_pack_length=stop")
    assert (built.cu_seqlens.tolist(), built.report["dropped"]) == ([0, 1, 2], 2)


@pytest.mark.parametrize("messages", [[], EMPTY, EMPTY * 3], ids=["no message", "no token", "no token in three"])
def test_r_layout_6_a_row_of_nothing_is_refused(messages):
    with pytest.raises(RowRefused) as refused:
        row(messages, 4)
    assert refused.value.kind == "empty_row"


def test_r_boundary_1_ignored_labels():
    built = row(M + talk("", "", "w5 w6"), 8, f"{MAIN},boundary_label=ignore")
    assert built.target_ids.tolist() == [_, 14, 15, _, 18, 0, 0, 0]
    assert built.token_mask.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]


def test_r_mask_1_by_position_trains_a_pad_id_of_the_content():
    built = row(talk("w0 ", "w1 ", "w2 zzz w3"), 8, f"{MAIN},padding_mask=by_position")
    assert built.token_mask.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_r_split_1_only_the_exact_role_splits():
    messages = [{"role": role, "content": "w0 "} for role in ("user", "System", "system", "system")]
    conversations = prompts.split_conversations(messages)
    assert [len(conversation) for conversation in conversations] == [2, 1, 1]


def test_r_report_counts_what_a_row_loses():
    messages = [
        *talk("w0 ", "w1 ", "w2 "),
        *EMPTY,
        {"role": "system", "content": "w3 ", "tool_calls": [1]},
        {"role": "user", "content": "w4 w5", "tool_calls": None},
        *talk("w6"),
    ]
    assert row(messages, 5).report == {
        "conversations": 4,
        "kept": 2,
        "truncated": 1,
        "dropped": 1,
        "empty_conversations": 1,
        "truncated_tokens": 1,
        "hidden_segments": 0,
        "padding_tokens": 0,
        "trained_tokens": 4,
        "boundary_labels": 1,
        "unrendered_messages": 0,
        "unknown_keys": 1,
    }


def test_r_report_1_a_conversation_that_is_cut_to_nothing_is_dropped():
    report = row(M + M, 4).report
    assert (report["kept"], report["truncated"], report["dropped"], report["truncated_tokens"]) == (1, 0, 1, 4)
    assert report["hidden_segments"] == 1


def test_r_layout_7_lost_conversations_are_refused_where_asked():
    for pack_length, kind in ((4, "dropped"), (6, "truncated")):
        with pytest.raises(RowRefused) as refused:
            row(M + M, pack_length, "strict,lost_conversations=refuse,turn_rules=no_wrap")
        assert refused.value.kind == kind
    assert row(M + M, 8, "strict,lost_conversations=refuse").report["kept"] == 2


LOST = "lost_conversations=refuse"


@pytest.mark.parametrize(
    ("messages", "pack_length", "cp", "name", "kind"),
    [
        (
            talk("w0 ", "w1 ", "w2 ") * 3,
            10,
            2,
            f"megatron-lm-0.19,indivisible_segment=refuse,{LOST}",
            "indivisible_segment",
        ),
        ([{"role": "system", "content": "w0"}] * 3, 2, 1, f"megatron-lm-0.19,{LOST}", "too_many_boundaries"),
    ],
)
def test_r_layout_7_boundaries_are_checked_before_losses(messages, pack_length, cp, name, kind):
    with pytest.raises(RowRefused) as refused:
        row(messages, pack_length, name, cp=cp)
    assert refused.value.kind == kind


def test_r_batch_1_and_2_collate_and_flatten():
    rows = [row(M + M, 10), row(EMPTY + M, 10), row(M, 10)]
    batch = batches.collate(rows)
    assert batch.packed_cu_seqlens.tolist() == [[0, 4, 10], [0, 0, 10], [0, 10, -1]]
    assert batch.packed_cu_seqlens_lengths.tolist() == [3, 3, 2]
    assert batch.packed_max_seqlen.tolist() == [6, 10, 10]
    assert batch.input_lengths.tolist() == [10] * 3
    assert batch.sample_mask.tolist() == [1.0] * 3
    assert batch.input_ids.shape == (3, 10)
    flat, longest = batches.flatten_boundaries(batch)
    assert (flat.tolist(), longest) == ([0, 4, 10, 10, 20, 30], 10)
    assert flat.dtype == torch.int32


def test_r_batch_3_to_5_stride_validation_padding_and_divisor():
    assert [batches.rows_of_rank(range(7), rank, 3) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert batches.pad_validation([4, 5, 6], 2) == ([4, 5, 6, 6], [1.0, 1.0, 1.0, 0.0])
    assert batches.pad_validation([4, 5], 2) == ([4, 5], [1.0, 1.0])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert batches.valid_tokens(mask, torch.tensor([1.0, 0.0])) == 2.0
