"""Rows (docs/SPEC.md#row and #report): the layouts of semantics' worked examples, every refusal of a row, and what it reports."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from production.errors import PackproofError, RowRefused
from production.rows.builder import Row, RowBuilder, RowSettings
from production.semantics import CHOICES, PRESETS, parse

_ = -100
MAIN = "megatron-lm-main"


def words(**special):
    """w0.. are 12.., the unknown id and with it the pad is 0, spaces separate."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<SPECIAL_10>": 3, "<SPECIAL_11>": 4, "<SPECIAL_12>": 5, "\n": 6}
    vocabulary |= {f"w{number}": 12 + number for number in range(60)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    names = ("<unk>", "<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"unk_token": "<unk>", "eos_token": "</s>"} | special))


TOKENIZER = words()


def conversation(first="w0 ", then="w1 ", answer="w2 w3 "):
    return [
        {"role": "system", "content": first},
        {"role": "user", "content": then},
        {"role": "assistant", "content": answer},
    ]


M = conversation()
EMPTY = [{"role": "system", "content": ""}]
THREE = [{"role": "system", "content": "w0 w1 w2 "}]


def build(messages, pack_length, *, cp=1, semantics=MAIN, tokenizer=TOKENIZER, **options):
    options = {"prompt_format": "identity"} | options
    settings_of_row = RowSettings(
        pack_length=pack_length, context_parallel_size=cp, semantics=parse(semantics), **options
    )
    return RowBuilder(tokenizer=tokenizer, settings=settings_of_row).build(messages)


def kind_of(messages, pack_length, **options):
    with pytest.raises(RowRefused) as error:
        build(messages, pack_length, **options)
    assert error.value.fix
    assert error.value.what
    return error.value.kind


def mask(row):
    return "".join(str(int(value)) for value in row.token_mask.tolist())


LAYOUTS = {
    "one": (M, 4, [12, 13, 14, 15], [_, 14, 15, 0], "0110", [0, 4]),
    "one, its last label lost": (M, 3, [12, 13, 14], [_, 14, 0], "010", [0, 3]),
    "two": (
        [*M, *M],
        10,
        [12, 13, 14, 15, 12, 13, 14, 15, 0, 0],
        [_, 14, 15, _, _, 14, 15, 0, 0, 0],
        "0110011000",
        [0, 4, 10],
    ),
    "exact fill, then more": (
        [*M, *M, *M],
        8,
        [12, 13, 14, 15] * 2,
        [_, 14, 15, _, _, 14, 15, 0],
        "01100110",
        [0, 4, 8],
    ),
    "empty first": ([*EMPTY, *M], 6, [12, 13, 14, 15, 0, 0], [_, 14, 15, 0, 0, 0], "011000", [0, 0, 6]),
    "empty in the middle": (
        [*M, *EMPTY, *M],
        10,
        [12, 13, 14, 15, 12, 13, 14, 15, 0, 0],
        [_, 14, 15, _, _, 14, 15, 0, 0, 0],
        "0110011000",
        [0, 4, 4, 10],
    ),
    "empty last": ([*M, *EMPTY], 6, [12, 13, 14, 15, 0, 0], [_, 14, 15, 0, 0, 0], "011000", [0, 4, 6]),
    "the pad id in content": (
        [{"role": "user", "content": "w1 "}, {"role": "assistant", "content": "w2 zzz w3"}],
        8,
        [13, 14, 0, 15, 0, 0, 0, 0],
        [14, 0, 15, 0, 0, 0, 0, 0],
        "10100000",
        [0, 8],
    ),
    "across the boundary": (
        [*M, *conversation("", "", "w5 w6")],
        8,
        [12, 13, 14, 15, 17, 18, 0, 0],
        [_, 14, 15, 17, 18, 0, 0, 0],
        "01111000",
        [0, 4, 8],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    """R-LAYOUT, R-SHIFT-1, R-MASK-1, R-CU-1: the worked examples, identity with prompts masked"""
    messages, pack_length, input_ids, target_ids, token_mask, cu_seqlens = LAYOUTS[name]
    row = build(messages, pack_length)
    assert row.input_ids.tolist() == input_ids
    assert row.target_ids.tolist() == target_ids
    assert mask(row) == token_mask
    assert row.cu_seqlens.tolist() == cu_seqlens
    assert row.max_seqlen == int(np.diff(cu_seqlens).max())
    assert [row.input_ids.dtype, row.target_ids.dtype, row.position_ids.dtype] == [torch.int64] * 3
    assert (row.token_mask.dtype, row.cu_seqlens.dtype, type(row.max_seqlen)) == (torch.float32, torch.int32, int)


def test_unmasked_identity_trains_on_all():
    """R-TARGET-1 under identity_prompt = trained"""
    row = build(M, 4, semantics="megatron-lm-0.19")
    assert (row.target_ids.tolist(), mask(row)) == ([13, 14, 15, 0], "1110")


def test_positions_restart_with_each_conversation_that_has_a_token():
    """R-LAYOUT-1, 6"""
    assert build([*M, *M], 10).position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert build([*M, *EMPTY], 6).position_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert build([*EMPTY, *M], 6).position_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_context_parallel_padding():
    """R-LAYOUT-2"""
    row = build([*THREE, *THREE], 16, cp=2, semantics="megatron-lm-0.19")
    assert row.input_ids.tolist() == [12, 13, 14, 0, 12, 13, 14, *[0] * 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, *range(12)]
    assert row.cu_seqlens.tolist() == [0, 4, 16]
    assert mask(row) == "1101110000000000"[:4] + "110000000000"
    assert row.target_ids[3] == 12  # the pad at 3 trains on w0
    row = build([*THREE, *THREE, *THREE], 10, cp=2, semantics="megatron-lm-0.19")
    assert row.cu_seqlens.tolist() == [0, 4, 8, 10]


def test_boundary_labels_are_ignored_also_behind_padding():
    """R-BOUNDARY-1"""
    row = build([*THREE, *THREE], 16, cp=2, semantics="megatron-lm-0.19,boundary_label=ignore")
    assert row.target_ids.tolist()[:5] == [13, 14, 0, _, 13]
    row = build([*M, *conversation("", "", "w5 w6")], 8, semantics=MAIN + ",boundary_label=ignore")
    assert (row.target_ids.tolist(), mask(row)) == ([_, 14, 15, _, 18, 0, 0, 0], "01101000")


def test_padding_by_position_trains_on_a_pad_id_in_content():
    """R-MASK-1"""
    messages = LAYOUTS["the pad id in content"][0]
    assert mask(build(messages, 8, semantics=MAIN + ",padding_mask=by_position")) == "11100000"
    # The label of the last position of a cut row is a pad that was put there.
    assert mask(build(M, 3, semantics=MAIN + ",padding_mask=by_position")) == "010"
    row = build([*THREE, *THREE], 16, cp=2, semantics="megatron-lm-0.19,padding_mask=by_position")
    assert mask(row) == "1101" + "110000000000"


@pytest.mark.parametrize(
    ("messages", "pack_length", "semantics", "kind"),
    [
        ([], 4, MAIN, "empty_row"),
        (EMPTY, 4, MAIN, "empty_row"),
        ([*EMPTY, *EMPTY], 1, MAIN + ",boundaries_beyond_pack_length=stop", "empty_row"),
        ([*THREE, 5], 2, MAIN, "bad_message"),
        (THREE, 4, "strict", "row_end"),
        (M[1:], 4, "strict", "row_start"),
        ([*M, *conversation(answer="")], 3, MAIN, None),
        ([*M, *conversation(answer="")], 4, MAIN, "empty_assistant"),
        ([*M, *conversation(answer="")], 5, MAIN, "empty_assistant"),
        ([*M, *conversation(answer="")], 4, MAIN + ",exact_fill=stop", None),
        ([*THREE, *EMPTY, *EMPTY, *EMPTY], 3, MAIN, "too_many_boundaries"),
        ([*EMPTY, *EMPTY, *EMPTY, *THREE], 3, MAIN + ",boundaries_beyond_pack_length=stop", "empty_row"),
        ([*M, *M], 4, MAIN + ",lost_conversations=refuse", "dropped"),
        ([*M, *M], 6, MAIN + ",lost_conversations=refuse", "truncated"),
        ([*M, *M, *M], 6, MAIN + ",lost_conversations=refuse", "dropped"),
        ([*M, *M], 8, MAIN + ",lost_conversations=refuse", None),
        ([*M, *EMPTY], 6, MAIN + ",empty_conversation=refuse", "empty_conversation"),
    ],
)
def test_refusals(messages, pack_length, semantics, kind):
    """R-LAYOUT-1 to 7, R-ENDS-1, R-EMPTY-1, and docs/SPEC.md#refusals's order"""
    if kind is None:
        assert build(messages, pack_length, semantics=semantics).report["conversations"] == 2
    else:
        assert kind_of(messages, pack_length, semantics=semantics) == kind


def test_a_full_row_looks_at_the_next_conversation_under_continue_only():
    """R-LAYOUT-4"""
    bad = [*M, *conversation(answer="")]
    assert kind_of(bad, 4, semantics=MAIN) == "empty_assistant"
    row = build(bad, 4, semantics=MAIN + ",exact_fill=stop")
    assert (row.report["dropped"], row.cu_seqlens.tolist()) == (1, [0, 4])


def test_no_conversation_is_begun_once_there_are_as_many_boundaries_as_the_row_can_have():
    """R-LAYOUT-5"""
    row = build(
        [*THREE, *EMPTY, *EMPTY, *EMPTY], 3, semantics=MAIN + ",boundaries_beyond_pack_length=stop,exact_fill=continue"
    )
    assert row.report["dropped"] == 1
    assert row.report["hidden_segments"] == 2


def test_indivisible_segments():
    """R-LAYOUT-7"""
    semantics = MAIN + ",indivisible_segment=refuse"
    assert kind_of([*M, *M], 10, cp=2, semantics=semantics) == "indivisible_segment"
    assert build([*M, *M], 12, cp=2, semantics=semantics).cu_seqlens.tolist() == [0, 4, 12]
    assert build([*M, *M], 10, cp=1, semantics=semantics).cu_seqlens.tolist() == [0, 4, 10]


def test_unsupported_format_comes_before_anything_else():
    """R-FORMAT-1"""
    assert kind_of([5], 4, prompt_format="default", semantics="nemo-rl-direct") == "unsupported_format"


def test_pad_tokens():
    """R-PAD-1"""
    assert build(M, 6, pad_token="w9").input_ids.tolist() == [12, 13, 14, 15, 21, 21]
    assert build(M, 6, pad_token="nothing").input_ids.tolist() == [12, 13, 14, 15, 0, 0]
    assert kind_of([5], 6, pad_token="nothing", semantics="strict") == "no_pad_token"
    assert kind_of([], 6, pad_token="", semantics="strict") == "no_pad_token"
    assert build(M, 6, pad_token="<unk>", semantics="strict").input_ids.tolist() == [12, 13, 14, 15, 0, 0]
    without = words(unk_token=None)
    assert kind_of(M, 6, pad_token="nothing", tokenizer=without) == "no_pad_token"
    assert kind_of([*M, *conversation(answer="")], 9, pad_token="nothing", tokenizer=without) == "empty_assistant"
    assert kind_of(EMPTY, 6, pad_token="nothing", tokenizer=without) == "empty_row"


def test_default_pads_with_the_pad_token_else_eos():
    """R-PAD-1"""
    for special, pad in [({"pad_token": "<s>"}, 1), ({}, 2)]:
        tokenizer = words(**special)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        assert build(M, 6, prompt_format="default", tokenizer=tokenizer).input_ids.tolist()[4:] == [pad, pad]
    tokenizer = words(eos_token=None)
    tokenizer.chat_template = "x"
    assert kind_of(M, 6, prompt_format="default", tokenizer=tokenizer) == "no_pad_token"
    assert kind_of([], 6, prompt_format="default", tokenizer=tokenizer, semantics="strict") == "no_pad_token"


def test_the_assistant_prefix_is_the_formats_or_the_settings():
    """R-PREFIX-1"""
    messages = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1 w2"}]
    trained = [
        build(messages, 32, prompt_format="nemotron-nano-v2", assistant_prefix_len=prefix).report["trained_tokens"]
        for prefix in (3, None, 0, 1)
    ]
    assert trained[0] == trained[1]
    assert trained[2] > trained[3] > trained[0] > 0


@pytest.mark.parametrize("format_name", ["nemotron-nano-v2", "nemotron-h-aligned", "identity"])
def test_what_a_full_row_never_reaches_never_surfaces(format_name):
    """R-LAYOUT-3"""
    worst = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": ""}, {"role": 5, "content": None}]
    bad = [*EMPTY, *worst]
    messages = [*itertools.chain.from_iterable(conversation() for _ in range(50)), *bad * 20]
    for pack_length in (1, 3, 20, 100, 150):
        row = build(messages, pack_length, prompt_format=format_name)
        assert row.report["dropped"] >= 20
    assert kind_of(messages, 4096, prompt_format=format_name) in {"bad_text", "bad_content", "bad_message"}


def test_not_much_is_tokenized_beyond_a_full_row():
    """R-LAYOUT-3: later conversations are not tokenized, but for a bounded run ahead."""
    builder = RowBuilder(tokenizer=TOKENIZER, settings=RowSettings(pack_length=1000, prompt_format="identity"))
    seen = []
    encode = builder._conversations._encoder._batch
    builder._conversations._encoder._batch = lambda texts: (seen.extend(texts), encode(texts))[1]
    texts = [" ".join(f"w{(number * step) % 50}" for number in range(100)) for step in range(1, 300)]
    builder.build([{"role": "system", "content": text} for text in texts])
    assert 0 < sum(text.count("w") for text in seen) < 3000


REPORTS = [
    # messages, P, options, what to expect of the report
    ([*M, *M], 10, {}, {"conversations": 2, "kept": 2, "padding_tokens": 2, "trained_tokens": 4, "boundary_labels": 0}),
    ([*M, *M], 6, {}, {"kept": 1, "truncated": 1, "dropped": 0, "truncated_tokens": 2, "padding_tokens": 0}),
    ([*M, *M, *M], 8, {}, {"kept": 2, "truncated": 0, "dropped": 1, "truncated_tokens": 4, "hidden_segments": 1}),
    ([*M, *M, *M], 7, {}, {"kept": 1, "truncated": 1, "dropped": 1, "truncated_tokens": 1, "hidden_segments": 0}),
    ([*M, *EMPTY, *M], 4, {}, {"kept": 2, "dropped": 1, "empty_conversations": 1, "hidden_segments": 2}),
    ([*M, *EMPTY], 6, {}, {"kept": 2, "empty_conversations": 1, "hidden_segments": 0, "padding_tokens": 2}),
    ([*M, *conversation("", "", "w5 w6")], 8, {}, {"boundary_labels": 1, "trained_tokens": 4}),
    ([*M, *EMPTY, *conversation("", "", "w5 w6")], 8, {}, {"boundary_labels": 1, "trained_tokens": 4}),
    ([*THREE, *THREE], 16, {"cp": 2, "semantics": "megatron-lm-0.19"}, {"padding_tokens": 10, "boundary_labels": 1}),
    ([*THREE, *THREE], 6, {"cp": 2}, {"padding_tokens": 1, "kept": 1, "truncated": 1, "truncated_tokens": 1}),
    (
        [*M, *M, *M],
        8,
        {"semantics": MAIN + ",exact_fill=stop"},
        {"dropped": 1, "truncated_tokens": 0, "hidden_segments": 0},
    ),
    ([{**M[0], "x": 1}, *M[1:]], 8, {}, {"unknown_keys": 1, "unrendered_messages": 0}),
]


@pytest.mark.parametrize(("messages", "pack_length", "options", "expected"), REPORTS)
def test_reports(messages, pack_length, options, expected):
    """R-REPORT-1 to 3"""
    report = build(messages, pack_length, **options).report
    assert {name: report[name] for name in expected} == expected
    assert report["conversations"] == report["kept"] + report["truncated"] + report["dropped"]


def as_lists(row):
    if isinstance(row, RowRefused):
        return (row.kind, row.conversation, row.turn)
    fields = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")
    return [getattr(row, field).tolist() for field in fields], row.max_seqlen, row.report


@pytest.mark.parametrize(("workers", "group"), [(0, 1), (0, 70), (1, 1000), (2, 70)])
def test_many_rows_ahead_are_the_same_rows_in_order(workers, group, monkeypatch):
    monkeypatch.setattr("production.rows.builder.GROUP_TOKENS", group)
    rows = [[*conversation(answer=f"w{number % 50} ")] * (1 + number % 5) for number in range(40)]
    rows[7] = conversation(answer="")
    rows[20] = []
    builder = RowBuilder(tokenizer=TOKENIZER, settings=RowSettings(pack_length=14, semantics=parse("strict")))
    rows[31] = conversation(answer="\ud800")
    found = list(builder.build_many(iter(rows), workers=workers))
    assert [isinstance(row, Row) for row in found].count(False) == 3
    for messages, row in zip(rows, found, strict=True):
        assert as_lists(row) == as_lists(builder.build_group([messages])[0])


texts = st.lists(st.sampled_from(["w1 ", "w2", " ", "zzz ", "\n", "<SPECIAL_11>", "</s>"]), max_size=5).map("".join)
conversations = st.tuples(texts, texts, texts).map(lambda three: conversation(*three))
rows_of_messages = st.lists(
    st.one_of(conversations, conversations, st.just(EMPTY), st.just(M)), min_size=1, max_size=6
).map(lambda found: list(itertools.chain.from_iterable(found)))


def test_a_row_does_not_depend_on_how_much_is_tokenized_at_once():
    """R-LAYOUT-1 to 6: run by run, or one conversation at a time"""
    outcomes = set()

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        rows_of_messages,
        st.sampled_from([1, 2, 3, 4, 7, 8, 16, 30]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from(["nemotron-nano-v2", "nemotron-h-aligned", "identity"]),
        st.one_of(
            st.sampled_from([*PRESETS, *(f"{MAIN},{name}={value}" for name in CHOICES for value in CHOICES[name])]),
            st.sampled_from([f"{MAIN},lost_conversations=refuse", f"{MAIN},empty_conversation=refuse"]),
        ),
        st.booleans(),
    )
    def same(messages, pack_length, cp, prompt_format, semantics, reuse):
        settings_of_row = RowSettings(
            pack_length=pack_length, context_parallel_size=cp, prompt_format=prompt_format, semantics=parse(semantics)
        )
        at_once = RowBuilder(tokenizer=TOKENIZER, settings=settings_of_row)
        one_by_one = RowBuilder(tokenizer=TOKENIZER, settings=settings_of_row, reuse_equal_turns=reuse)
        one_by_one._characters_ahead = lambda _: 1
        found = as_lists(at_once.build_group([messages])[0])
        assert found == as_lists(one_by_one.build_group([messages])[0])
        outcomes.add(found[0] if isinstance(found[0], str) else "a row")

    same()
    assert {
        "a row",
        "empty_row",
        "truncated",
        "dropped",
        "empty_assistant",
        "empty_conversation",
    } <= outcomes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pack_length": 0}, "pack_length"),
        ({"context_parallel_size": 0}, "context_parallel_size"),
        ({"prompt_format": "nemotron-nano"}, "nemotron-nano-v2"),
        ({"assistant_prefix_len": -1}, "assistant_prefix_len"),
        ({"assistant_prefix_len": 1, "prompt_format": "identity"}, "identity"),
    ],
)
def test_settings_that_no_row_could_satisfy_are_errors(changes, named):
    """docs/SPEC.md#refusals"""
    with pytest.raises(PackproofError, match=named):
        RowSettings(**({"pack_length": 8} | changes))
