"""Prompts to tokens and targets (docs/SPEC.md#input, #prompts and #targets-and-turns), and the proof that lets a conversation be encoded in parts."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from production.errors import RowRefused
from production.semantics import parse
from production.tokens.conversations import ConversationTokenizer
from production.tokens.encoder import TextEncoder, UnencodableError
from production.tokens.prompts import (
    FORMATS,
    check_row_ends,
    count_unrendered,
    render_messages,
    render_template,
    split_conversations,
)
from production.tokens.text_splits import ENDS_LINES, HardBoundaries

SYSTEM, TURN, END = "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"
SPECIALS = ["<unk>", "<s>", "</s>", "<SPECIAL_233>", SYSTEM, TURN, END, "<SPECIAL_999>"]
NANO, ALIGNED, IDENTITY, DEFAULT = "nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"


def byte_level(*extra, merges=(("Ċ", "Ċ"), ("Ċ", "a"), ("a", "b"), ("b", "Ċ"), ("Ġ", "Ġ")), specials=None, **how):
    """Bytes with merges across newlines and spaces; `how` and `extra` are about added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index + 50 for index, letter in enumerate([*letters, *("".join(merge) for merge in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for special in SPECIALS if specials is None else specials:
        backend.add_special_tokens([AddedToken(special, special=True, **({"normalized": False} | how))])
    backend.add_tokens(list(extra))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def changed(change, tokenizer=None, **how):
    tokenizer = byte_level(**how) if tokenizer is None else tokenizer
    change(tokenizer.backend_tokenizer)
    return tokenizer


def system(text=""):
    return {"role": "system", "content": text}


def user(text="a"):
    return {"role": "user", "content": text}


def assistant(text="b"):
    return {"role": "assistant", "content": text}


def refused(action, *arguments, **options):
    with pytest.raises(RowRefused) as error:
        action(*arguments, **options)
    assert error.value.fix
    return error.value


# docs/SPEC.md#input and #prompts


def test_a_row_splits_before_each_message_of_the_role_system_exactly():
    """R-SPLIT-1"""
    row = split_conversations([user(), {"role": "System", "content": ""}, system(), user(), system(), system("x")])
    assert row.bounds == [0, 2, 4, 5, 6]
    assert row.conversation(1) == [system(), user()]
    assert split_conversations([system(), user()]).bounds == [0, 2]


@pytest.mark.parametrize("bad", ["text", None, 5, ["role"], {"content": "no role"}])
def test_what_is_no_message_is_refused_also_far_behind(bad):
    """R-SPLIT-2"""
    error = refused(split_conversations, [system(), user(), system(), user(), bad])
    assert (error.kind, error.conversation, error.turn) == ("bad_message", 1, 2)


def test_a_message_can_be_any_mapping():
    import types

    assert split_conversations([types.MappingProxyType(system()), system()]).bounds == [0, 1, 2]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([user(), assistant()], "row_start"),
        ([system(), user()], "row_end"),
        ([{"role": "System"}, user()], "row_start"),
        ([{"role": ["system"]}, user()], "row_start"),
        ([user(), {"content": "w1"}, assistant()], "row_start"),
        ([system(), "w0", user()], "row_end"),
        ([{"content": "w0"}, user()], "bad_message"),
        ([system(), "w0"], "bad_message"),
        ([user(), "w0"], "row_start"),
    ],
)
def test_row_ends(messages, kind):
    """R-ENDS-1: the first message, then the last one, before any message between them."""
    assert refused(check_row_ends, messages).kind == kind


def rendered(name, *messages):
    return render_messages(list(messages), FORMATS[name], 0)


def test_nano_v2_renders_as_the_table_says():
    """R-RENDER-1"""
    texts = rendered(
        NANO, system(" s\n"), user("\tu "), assistant("\n a\u2003"), {"role": "tool", "content": None}, {"role": "User"}
    )
    assert texts == [f"{SYSTEM}System\ns\n", f"{TURN}User\nu\n", f"{TURN}Assistant\na\n{END}\n", "", ""]


def test_h_aligned_renders_as_the_table_says():
    """R-RENDER-1"""
    texts = rendered(ALIGNED, system(" s/think"), user(" u "), assistant(" a/think "), {"role": "Assistant"})
    assert texts == [f"{SYSTEM}System\ns/think\n", f"{TURN}User\nu\n{TURN}Assistant\n", "a/think\n", ""]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a /think b", "a  b"),
        ("/no_think", ""),
        ("/no_/thinkthink", ""),  # /think goes first and leaves a /no_think
        ("/thi/thinknk", "/think"),  # one pass
        ("/no_thi/no_thinknk", "/no_think"),
        ("src/thinking", "srcing"),
    ],
)
def test_think_is_removed_in_one_pass_each(before, after):
    """R-RENDER-1"""
    assert rendered(NANO, user(before)) == [f"{TURN}User\n{after}\n"]
    assert rendered(NANO, system(before)) == [f"{SYSTEM}System\n{after}\n"]
    assert rendered(NANO, assistant(before)) == [f"{TURN}Assistant\n{before}\n{END}\n"]


@pytest.mark.parametrize("name", [NANO, ALIGNED])
@pytest.mark.parametrize("content", [None, 5, ["text"], {}, "missing"])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_content_that_is_not_text_is_refused_in_the_nemotron_formats(name, content, role):
    """R-RENDER-2"""
    message = {"role": role} if content == "missing" else {"role": role, "content": content}
    error = refused(rendered, name, system("x"), message)
    assert (error.kind, error.turn) == ("bad_content", 1)


def test_identity_renders_everything_and_what_is_no_text_as_str():
    """R-RENDER-3"""
    texts = rendered(IDENTITY, system(" s "), {"role": "x"}, user(None), user(5), user(["a", None]), user({"a": 1.5}))
    assert texts == [" s ", "", "", "5", "['a', None]", "{'a': 1.5}"]


def test_a_message_that_renders_nothing_and_unknown_keys_are_counted():
    """R-REPORT-3"""
    row = split_conversations(
        [
            system(),
            {"role": "tool", "content": "t"},
            {"role": "tool", "content": ""},
            {"role": "User", "content": ["x"]},
            {"role": "assistant", "content": "a", "tool_calls": [1]},
            {"role": "assistant", "content": "a", "tool_calls": None},
            {"role": "assistant", "name": "n"},
        ]
    )
    assert count_unrendered(row, FORMATS[NANO]) == (2, 2)
    assert count_unrendered(row, FORMATS[IDENTITY]) == (0, 2)
    assert count_unrendered(row, FORMATS[DEFAULT]) == (None, None)


def test_default_renders_through_the_template_and_names_its_errors():
    """R-RENDER-4"""
    tokenizer = byte_level()
    assert refused(render_template, [user()], tokenizer, 3).kind == "no_chat_template"
    tokenizer.chat_template = "{{ messages[0]['content'] }}|{{ add_generation_prompt }}|{{ eos_token }}"
    assert render_template([user("hi")], tokenizer, 0) == "hi|False|</s>"
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0]['role']) }}"
    error = refused(render_template, [user()], tokenizer, 3)
    assert (error.kind, error.conversation) == ("template_error", 3)
    assert "no user" in error.what


# The proof

HARD = [TURN, SYSTEM]
PIECES = [
    "a",
    "b",
    "ab",
    "\n",
    "\n\n",
    " ",
    "  ",
    "é",
    "e\u0301",
    "数",
    "🙂",
    "A",
    "<",
    ">",
    "<SPECIAL_",
    "11>",
    *SPECIALS,
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def with_pre_tokenizer(part):
    def change(backend):
        backend.pre_tokenizer = pre_tokenizers.Sequence([part, pre_tokenizers.ByteLevel(add_prefix_space=False)])

    return lambda: changed(change)


def unigram(**how):
    pieces = [("<unk>", 0.0), *((letter, -3.0) for letter in "ab▁\né数A<>SPECIAL_1"), ("▁a", -2.0), ("ab", -2.0)]
    backend = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(**how)
    backend.add_special_tokens([AddedToken(special, normalized=False, special=True) for special in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def normalizing(*parts):
    def change(backend):
        backend.normalizer = normalizers.Sequence(list(parts))

    return lambda: changed(change)


PROVABLE = {
    "bytes": byte_level,
    "a shorter neighbour": lambda: byte_level(AddedToken("<SPECIAL_1", normalized=False)),
    "stripping neighbours": lambda: byte_level(
        AddedToken("ab", normalized=False, lstrip=True, rstrip=True),
        AddedToken("b", normalized=False, single_word=True),
    ),
    "normalized neighbours": lambda: byte_level(AddedToken(">a", normalized=True), AddedToken("\n<", normalized=True)),
    "NFC, strip, prepend": normalizing(normalizers.NFC(), normalizers.Strip(), normalizers.Prepend("b")),
    "lower case, folded space": normalizing(normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")),
    "prefix space": lambda: changed(
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
    ),
    "split": with_pre_tokenizer(pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)"), "isolated")),
    "punctuation": with_pre_tokenizer(pre_tokenizers.Punctuation()),
    "scripts": with_pre_tokenizer(pre_tokenizers.UnicodeScripts()),
    "metaspace always": lambda: unigram(prepend_scheme="always"),
    "metaspace never": lambda: unigram(prepend_scheme="never"),
}


@pytest.mark.parametrize("name", PROVABLE)
def test_what_is_proven_to_cut_does_cut_every_text(name):
    """R-ENCODE-1: encode(a + token + b) is encode(a), the token, encode(b)."""
    tokenizer = PROVABLE[name]()
    boundaries = HardBoundaries(tokenizer)
    seen = set()

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(texts, texts, st.sampled_from([*HARD, boundaries.separator()]))
    def holds(before, after, token):
        assert boundaries.holds(token)
        seen.add((before, after))
        whole = encode(before + token + after)
        assert whole == [*encode(before), tokenizer.convert_tokens_to_ids(token), *encode(after)]
        assert whole == encode(before) + encode(token + after)

    holds()
    assert len(seen) > 30


REFUTED = {
    "lstrip": (lambda: byte_level(lstrip=True), "a ", "b"),
    "rstrip": (lambda: byte_level(rstrip=True), "a", "  b"),
    "single word": (lambda: byte_level(single_word=True), "a", "b"),
    "normalized": (
        lambda: changed(lambda b: setattr(b, "normalizer", normalizers.Replace("a<", "b")), normalized=True),
        "a",
        "b",
    ),
    "straddled from the left": (lambda: byte_level(AddedToken("ab<SPEC", normalized=False)), "ab", "b"),
    "straddled to the right": (lambda: byte_level(AddedToken(TURN + "Us", normalized=False)), "a", "User"),
    "no such token": (lambda: byte_level(specials=["<unk>"]), "\n", "\n"),
}


@pytest.mark.parametrize("name", REFUTED)
def test_the_proof_fails_where_encoding_in_pieces_gives_other_ids(name):
    make, before, after = REFUTED[name]
    tokenizer = make()

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert encode(before + TURN + after) != [*encode(before), tokenizer.convert_tokens_to_ids(TURN), *encode(after)]
    assert not HardBoundaries(tokenizer).holds(TURN)


HEADER = f"{TURN}Assistant\n"


def split_by(pattern, *extra):
    def change(backend):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])

    tokenizer = byte_level(*extra, merges=(("Ċ", "/"), ("Ċ", "Ċ"), ("t", "Ċ"), ("Ċ", "a"), ("a", "b"), ("b", "Ċ")))
    change(tokenizer.backend_tokenizer)
    return tokenizer


@pytest.mark.parametrize("pattern", sorted(ENDS_LINES))
def test_a_text_behind_a_headers_line_is_encoded_as_it_is_alone(pattern):
    """R-ENCODE-1: an answer of nemotron-h-aligned is encoded once."""
    tokenizer = split_by(pattern, AddedToken("ab", normalized=False, rstrip=True, single_word=True))
    assert HardBoundaries(tokenizer).ends_lines
    seen = set()

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(texts, st.text(max_size=6)), st.sampled_from(["", "/", "'s", "\u0301", "1", ".\n/", "\u200b", "Aa"])
    )
    def holds(text, first):
        answer = (first + text).strip()
        if answer:
            seen.add(answer)
            assert encode(HEADER + answer) == encode(HEADER) + encode(answer)

    holds()
    assert len(seen) > 60
    white = "\n" + "a"  # what is left out: an answer that begins with white space
    assert encode(HEADER + white) != encode(HEADER) + encode(white)


TEKKEN = next(pattern for pattern in ENDS_LINES if "Lm" in pattern)
JOINS_LINES = {
    "another pattern": lambda: split_by(r"Assistant\n/"),
    "a normalizer": lambda: changed(
        lambda b: setattr(b, "normalizer", normalizers.Replace("\n/", "a")), tokenizer=split_by(TEKKEN)
    ),
    "a token over the newline": lambda: split_by(TEKKEN, AddedToken("\n/", normalized=False)),
    "a token that takes white space": lambda: split_by(TEKKEN, AddedToken("/", normalized=False, lstrip=True)),
}


@pytest.mark.parametrize("name", JOINS_LINES)
def test_where_an_answer_may_merge_with_its_header_the_proof_says_no(name):
    tokenizer = JOINS_LINES[name]()

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    assert encode(f"{HEADER}/b") != encode(HEADER) + encode("/b")
    assert not HardBoundaries(tokenizer).ends_lines


class OwnPreTokenizer:
    def pre_tokenize(self, text):
        text.split(lambda _, part: [part])


UNPROVEN = {
    "metaspace first": lambda: unigram(prepend_scheme="first"),
    "dropout": lambda: changed(lambda backend: setattr(backend.model, "dropout", 0.5)),
    "written in Python": lambda: changed(
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.PreTokenizer.custom(OwnPreTokenizer()))
    ),
    "special tokens split": lambda: splitting(byte_level()),
    "wordy ends": lambda: byte_level(specials=["aTURNa", *SPECIALS]),
    "an own class": lambda: OwnTokenizer(tokenizer_object=byte_level().backend_tokenizer),
    "none of tokenizers'": lambda: Slow(byte_level()),
}


def splitting(tokenizer):
    tokenizer.split_special_tokens = True
    return tokenizer


class OwnTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text, **options):
        return super()._encode_plus(text[::-1], **options)


class Slow:
    """A tokenizer without a backend: what the plain path asks for and no more."""

    def __init__(self, fast):
        self.fast = fast
        self.calls = 0

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        self.calls += 1
        return {"input_ids": self.fast(text, add_special_tokens=False)["input_ids"]}

    def __getattr__(self, name):
        if name in {"backend_tokenizer", "_tokenizer"}:
            raise AttributeError(name)
        return getattr(self.fast, name)


@pytest.mark.parametrize("name", UNPROVEN)
def test_the_proof_fails_for_unproven_tokenizers(name):
    boundaries = HardBoundaries(UNPROVEN[name]())
    assert not boundaries.holds("aTURNa" if name == "wordy ends" else TURN)


# Encoding


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(texts, min_size=1, max_size=12),
    st.sampled_from([*PROVABLE, *(set(UNPROVEN) - {"dropout"})]),
    st.booleans(),
)
def test_texts_are_encoded_as_each_alone(found, name, reuse):
    """R-ENCODE-1, through joined texts, equal ones once, and the plain path."""
    tokenizer = CACHE.setdefault(name, (PROVABLE | UNPROVEN)[name]())
    encoded = TextEncoder(tokenizer, reuse_equal=reuse).encode(found)
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in found]
    assert encoded.take(None).tolist() == list(itertools.chain.from_iterable(alone))
    assert encoded.lengths.tolist() == list(map(len, alone))
    backwards = np.arange(len(found))[::-1]
    assert encoded.take(backwards).tolist() == list(itertools.chain.from_iterable(alone[::-1]))


CACHE = {}


def test_a_separator_inside_a_text_does_not_separate():
    tokenizer = byte_level()
    encoder = TextEncoder(tokenizer)
    separator = HardBoundaries(tokenizer).separator()
    encoded = encoder.encode(["a", f"b{separator}a", "b"])
    assert encoded.lengths.tolist() == [1, 3, 1]


def test_truncation_and_padding_of_the_tokenizer_are_not_applied():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    encoder = TextEncoder(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert encoder.encode(["A" * 9, "A"]).lengths.tolist() == [9, 1]


@pytest.mark.parametrize("make", [byte_level, lambda: Slow(byte_level()), lambda: byte_level(specials=["<unk>"])])
def test_the_first_text_that_cannot_be_encoded_is_named_also_behind_equal_ones(make):
    """R-ENCODE-1"""
    with pytest.raises(UnencodableError) as error:
        TextEncoder(make()).encode(["a", "a", "b", "x\ud800", "\udfff"])
    assert error.value.index == 3


# Targets and turn checks


def tokenize(messages, name=NANO, semantics="megatron-lm-0.19", tokenizer=None, prefix=None):
    prompt_format = FORMATS[name]
    found = ConversationTokenizer(
        tokenizer=tokenizer or CACHE.setdefault("bytes", byte_level()),
        prompt_format=prompt_format,
        semantics=parse(semantics),
        assistant_prefix_len=prompt_format.assistant_prefix_len if prefix is None else prefix,
    )
    row = split_conversations(messages)
    return found.tokenize(row, first=0, last=row.count, characters=10**9)


def test_only_answers_behind_their_prefix_are_targets():
    """R-TARGET-1"""
    tokenizer = byte_level()
    found = tokenize([system("A"), user("A"), assistant("A")], tokenizer=tokenizer)
    # <SPECIAL_11>, then "Assistant\nA\n" by bytes, of which the prefix takes two
    trained = tokenizer.decode(found.targets[found.targets != -100].tolist())
    assert trained == f"sistant\nA\n{END}\n"
    assert found.tokens[found.targets != -100].tolist() == found.targets[found.targets != -100].tolist()


def test_a_prefix_longer_than_its_turn_goes_on_into_the_next_up_to_the_end_of_the_conversation():
    """R-TARGET-1: an `Assistant` turn renders no token, and its prefix is taken of what follows."""
    tokenizer = byte_level()
    found = tokenize([user("A"), assistant("A")], IDENTITY, "megatron-lm-main", tokenizer)
    assert found.targets.tolist() == [-100, tokenizer.convert_tokens_to_ids("A")]
    capital = [user("A"), {"role": "Assistant", "content": "A"}, user("A"), assistant("A")]
    found = tokenize(capital, NANO, "megatron-lm-0.19", tokenizer, prefix=500)
    assert set(found.targets.tolist()) == {-100}
    following = [user("A"), assistant("A"), system("A"), user("A"), assistant("AA")]
    found = tokenize(following, NANO, "megatron-lm-0.19", tokenizer, prefix=500)
    assert set(found.targets.tolist()) == {-100}


@pytest.mark.parametrize(("name", "trained"), [(IDENTITY, 3), (DEFAULT, 3)])
def test_nothing_is_masked_in_the_other_formats(name, trained):
    """R-TARGET-1"""
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = tokenize([system("A"), user("A"), assistant("A")], name, tokenizer=tokenizer)
    assert int((found.targets != -100).sum()) == trained


TURN_CASES = [
    # messages, format, semantics, kind, turn
    ([{"role": None, "content": "A"}], NANO, "megatron-lm-0.19", "bad_message", 0),
    ([{"role": ["x"], "content": "A"}], IDENTITY, "megatron-lm-main", "bad_message", 0),
    ([assistant("A"), {"role": 5, "content": "A"}], IDENTITY, "megatron-lm-main", "bad_message", 0),
    ([user(), assistant(None)], IDENTITY, "megatron-lm-main", "bad_content", 1),
    ([user(), {"role": "Assistant"}], NANO, "megatron-lm-0.19", "bad_content", 1),
    ([user(), assistant(7)], IDENTITY, "megatron-lm-main", "bad_content", 1),
    ([user(), assistant("")], NANO, "megatron-lm-0.19", "empty_assistant", 1),
    ([user(), assistant([])], IDENTITY, "megatron-lm-main", "empty_assistant", 1),
    ([user(), assistant("  ")], NANO, "megatron-lm-0.19", None, None),
    ([system(), assistant()], NANO, "megatron-lm-0.19", "role_order", 1),
    ([user(), assistant(), assistant()], NANO, "megatron-lm-0.19", "role_order", 2),
    ([assistant(), user()], NANO, "megatron-lm-0.19", None, None),
    ([assistant(), {"role": "TOOL", "content": ""}], NANO, "megatron-lm-0.19", None, None),
    ([assistant(), user()], NANO, "nemo-rl-direct", "role_order", 0),
    ([assistant()], NANO, "megatron-lm-0.19", "role_order", 0),
    ([{"role": "User", "content": "A"}, assistant()], NANO, "megatron-lm-0.19", None, None),
    ([{"role": "User", "content": "A"}, assistant()], NANO, "strict", "unknown_role", 0),
    ([user(), {"role": "model", "content": "A"}], NANO, "megatron-lm-0.19", "unknown_role", 1),
    ([user(), {"role": "model", "content": "A"}], IDENTITY, "megatron-lm-0.19", None, None),
    ([user(), {"role": "model", "content": "A"}], DEFAULT, "strict", "unknown_role", 1),
    ([user(), assistant("")], DEFAULT, "strict", "empty_assistant", 1),
    ([user(), assistant("")], DEFAULT, "megatron-lm-0.19", None, None),
    ([system(), assistant()], IDENTITY, "strict", "role_order", 1),
    ([user(), {"role": "Assistant", "content": "A"}], NANO, "nemo-rl-direct", "prefix_too_long", 1),
    ([user(), {"role": "Assistant", "content": "A"}], NANO, "megatron-lm-0.19", None, None),
    ([user("A"), assistant(" ")], ALIGNED, "megatron-lm-0.19", "turn_mismatch", 0),
    ([user("a"), assistant("b")], IDENTITY, "megatron-lm-main", "turn_mismatch", 0),
    ([user("A"), assistant("A")], IDENTITY, "megatron-lm-main", None, None),
    ([system("")], IDENTITY, "strict", "empty_conversation", None),
    ([system("")], IDENTITY, "megatron-lm-0.19", None, None),
    ([{"role": "tool", "content": "A"}], NANO, "strict", "empty_conversation", None),
    ([user("x\ud800")], NANO, "megatron-lm-0.19", "bad_text", None),
    ([user("x\ud800"), assistant("")], NANO, "megatron-lm-0.19", "bad_text", None),
    ([{"role": "tool", "content": "\ud800"}, user("A")], NANO, "megatron-lm-0.19", None, None),
]


@pytest.mark.parametrize(("messages", "name", "semantics", "kind", "turn"), TURN_CASES)
@pytest.mark.parametrize("slow", [False, True])
def test_turn_checks(messages, name, semantics, kind, turn, slow):
    """R-TURN-1 to 3, R-EMPTY-1, R-ENCODE-1, in the order of docs/SPEC.md#refusals"""
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = tokenize(messages, name, semantics, Slow(tokenizer) if slow else tokenizer)
    if kind is None:
        assert found.refused is None
        assert len(found.lengths) == 1
    else:
        assert (found.refused.kind, found.refused.conversation, found.refused.turn) == (kind, 0, turn)
        assert len(found.tokens) == len(found.targets) == len(found.lengths) == 0


def test_the_first_fault_is_named_and_earlier_turns_are_kept():
    good = [system("A"), user("A"), assistant("A")]
    for bad, kind in [
        ([system("A"), user("A"), assistant("")], "empty_assistant"),
        ([system("A"), user("\ud800")], "bad_text"),
        ([system("A"), user(None)], "bad_content"),
    ]:
        found = tokenize([*good, *bad, *good, system("A"), user("\ud800"), assistant("")])
        assert (found.refused.kind, found.refused.conversation) == (kind, 1)
        assert found.lengths.tolist() == tokenize(good).lengths.tolist()
        assert found.targets.tolist() == tokenize(good).targets.tolist()


def words(offset):
    """Word level, w0 from `offset` on; a newline is a word."""
    vocabulary = {"<unk>": 0} | {f"w{number}": offset + number for number in range(20)} | {"w3\n": offset + 30}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


class OffByOne(Slow):
    """Whole conversations come out one id higher than their turns."""

    def __call__(self, text, *, add_special_tokens):
        ids = super().__call__(text, add_special_tokens=add_special_tokens)["input_ids"]
        return {"input_ids": [index + 1 for index in ids] if text.count(" ") > 1 else ids}


@pytest.mark.parametrize(
    ("offset", "semantics", "kind"),
    [
        (10, "megatron-lm-main", "turn_mismatch"),
        (130_000, "megatron-lm-main", None),
        (130_000, "megatron-lm-main,turn_check=exact", "turn_mismatch"),
    ],
)
def test_an_id_off_by_one_passes_the_relative_check_from_100_000_on(offset, semantics, kind):
    """R-TURN-1, 5"""
    tokenizer = OffByOne(words(offset))
    found = tokenize([user("w0 "), assistant("w1 ")], IDENTITY, semantics, tokenizer)
    assert (found.refused.kind if found.refused else None) == kind
    if kind is None:
        assert found.tokens.tolist() == [offset + 1, offset + 2]
        assert found.targets.tolist() == [-100, offset + 2]


contents = st.lists(st.sampled_from(["a", "b", "A", "\n", " ", "/think", TURN, SYSTEM, "é", "\ud800"]), max_size=4).map(
    "".join
)
well_formed = st.lists(
    st.tuples(contents, contents, contents).map(
        lambda three: [system(three[0]), user(three[1]), assistant(three[2] or "A")]
    ),
    min_size=1,
    max_size=3,
).map(lambda conversations: list(itertools.chain.from_iterable(conversations)))
messages_of_rows = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from([*["system", "user", "assistant"] * 4, "tool", "User", "Assistant", "model"]),
        st.one_of(contents, contents, contents, st.sampled_from([None, 3, ""])),
    ),
    min_size=1,
    max_size=8,
)


def test_the_vectorised_way_is_the_one_that_goes_turn_by_turn(monkeypatch):
    """docs/SPEC.md#targets-and-turns: the sweep over whole rows, and cutting at proven places, change nothing but the time."""
    fast, plain = byte_level(), Slow(byte_level())
    outcomes = set()

    @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(messages_of_rows, well_formed),
        st.sampled_from([NANO, ALIGNED, IDENTITY]),
        st.sampled_from(["megatron-lm-0.19", "megatron-lm-main", "nemo-rl-direct", "strict"]),
        st.sampled_from([None, 1, 9]),
    )
    def same(messages, name, semantics, prefix):
        prefix = 0 if name == IDENTITY else prefix
        found = tokenize(messages, name, semantics, fast, prefix)
        with monkeypatch.context() as patch:
            patch.setattr("production.tokens.turn_tokens.TurnRules.find_prompts", lambda *_: None)
            walked = tokenize(messages, name, semantics, plain, prefix)
        assert (found.refused and found.refused.kind) == (walked.refused and walked.refused.kind)
        assert (found.refused and found.refused.turn) == (walked.refused and walked.refused.turn)
        for field in ("tokens", "targets", "lengths"):
            assert getattr(found, field).tolist() == getattr(walked, field).tolist()
        outcomes.add(found.refused.kind if found.refused else name)

    same()
    assert {NANO, ALIGNED, IDENTITY, "role_order", "bad_text", "turn_mismatch"} <= outcomes


def test_proven_turns_are_encoded_once_and_the_others_twice():
    messages = [system("4"), user("5"), assistant("6"), user("7"), assistant("8")]
    for name, times in [(NANO, {"5": 1, "6": 1}), (ALIGNED, {"5": 1, "6": 2}), (IDENTITY, {"5": 2, "6": 2})]:
        seen = []
        found = ConversationTokenizer(
            tokenizer=byte_level(),
            prompt_format=FORMATS[name],
            semantics=parse("megatron-lm-main"),
            assistant_prefix_len=0,
        )
        encode = found._encoder._batch
        found._encoder._batch = lambda texts, encode=encode, seen=seen: (seen.extend(texts), encode(texts))[1]
        row = split_conversations(messages)
        assert found.tokenize(row, first=0, last=1, characters=1).refused is None
        assert {letter: "".join(seen).count(letter) for letter in times} == times, name
