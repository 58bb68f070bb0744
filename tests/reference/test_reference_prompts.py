"""Formats, targets and turn checks of the reference (docs/SPEC.md#prompts and #targets-and-turns), with a tokenizer of one id a character."""

import pytest

from reference.prompts import (
    IGNORE_INDEX,
    Prompt,
    check_pad_token,
    matches,
    pad_id,
    render,
    split_conversations,
    tokenize_conversation,
)
from reference.refusals import RowRefused
from reference.semantics import semantics

NANO, ALIGNED, IDENTITY, DEFAULT = "nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"
OLD, MAIN, DIRECT, STRICT = "megatron-lm-0.19", "megatron-lm-main", "nemo-rl-direct", "strict"


class Characters:
    """One id a character; newlines at a seam merge, so that a turn may encode otherwise alone."""

    unk_id = None
    pad_id = None
    eos_id = 7

    def __init__(self, *, merges=False):
        self.merges = merges

    def encode(self, text):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise TypeError
        return [ord(letter) for letter in (text.replace("\n\n", "\u2029") if self.merges else text)]

    def render(self, conversation):
        if conversation[0]["content"] == "raise":
            raise KeyError("name")
        if conversation[0]["content"] == "none":
            raise LookupError
        return "|".join(message["content"] for message in conversation)

    def token_to_id(self, token):
        return {"<unk>": 0}.get(token)


def say(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def tokenize(conversation, prompt_format, name=OLD, tokenizer=None, **overrides):
    prompt = Prompt(format=prompt_format, **overrides)
    return tokenize_conversation(conversation, prompt, tokenizer or Characters(), semantics(name))


def refused(conversation, prompt_format, name=OLD, **more):
    with pytest.raises(RowRefused) as caught:
        tokenize(conversation, prompt_format, name, **more)
    return caught.value.kind, caught.value.turn


CONVERSATION = say(("system", " s /think"), ("user", " u/no_/thinkthink\n"), ("tool", "t"), ("assistant", " a /think "))


@pytest.mark.parametrize(
    ("prompt_format", "text"),
    [
        (NANO, "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\na /think\n<SPECIAL_12>\n"),
        (
            ALIGNED,
            "<SPECIAL_10>System\ns /think\n<SPECIAL_11>User\nu/no_/thinkthink\n<SPECIAL_11>Assistant\na /think\n",
        ),
        (IDENTITY, " s /think u/no_/thinkthink\nt a /think "),
        (DEFAULT, " s /think| u/no_/thinkthink\n|t| a /think "),
    ],
)
def test_r_render_the_four_formats(prompt_format, text):
    # /think goes first, which leaves /no_think behind for the second pass
    assert render(CONVERSATION, Prompt(format=prompt_format), Characters()) == text


@pytest.mark.parametrize(
    ("content", "text"), [(None, ""), ("absent", ""), (3, "3"), (["x", None], "['x', None]"), (True, "True")]
)
def test_r_render_3_identity_takes_anything(content, text):
    message = {"role": "user"} if content == "absent" else {"role": "user", "content": content}
    assert render([message], Prompt(format=IDENTITY), Characters()) == text


@pytest.mark.parametrize("prompt_format", [NANO, ALIGNED])
@pytest.mark.parametrize("content", [None, 3, ["x"]])
def test_r_render_2_the_nemotron_formats_need_text_in_rendered_messages(prompt_format, content):
    assert refused([{"role": "user", "content": content}], prompt_format) == ("bad_content", None)
    assert render([{"role": "User", "content": content}], Prompt(format=prompt_format), Characters()) == ""


def test_r_render_4_the_tokenizers_own_template():
    assert refused(say(("user", "raise")), DEFAULT)[0] == "template_error"
    assert refused(say(("user", "none")), DEFAULT)[0] == "no_chat_template"


def test_r_encode_1_a_lone_surrogate():
    assert refused(say(("user", "\ud800")), NANO)[0] == "bad_text"


def trained(conversation, prompt_format, name=OLD, **overrides):
    tokenized = tokenize(conversation, prompt_format, name, **overrides)
    return "".join(chr(target) if target != IGNORE_INDEX else "·" for target in tokenized.targets)


def test_r_target_1_the_format_decides_which_tokens_train():
    conversation = say(("system", "s"), ("user", "u"), ("assistant", "abc"))
    assert trained(conversation, IDENTITY) == "suabc"
    assert trained(conversation, IDENTITY, MAIN) == "··abc"
    assert trained(conversation, ALIGNED).lstrip("·") == "abc\n"
    # the prefix is three tokens, whatever they are: here three letters of <SPECIAL_11>
    assert trained(conversation, NANO).lstrip("·") == "ECIAL_11>Assistant\nabc\n<SPECIAL_12>\n"
    assert trained(conversation, NANO, assistant_prefix_len=0).lstrip("·").startswith("<SPECIAL_11>A")
    assert trained(conversation, DEFAULT) == "s|u|abc"


def test_r_target_1_a_long_prefix_masks_what_follows_and_r_turn_3_refuses_it():
    conversation = say(("Assistant", "x"), ("User", "y"), ("tool", "z"), ("assistant", "abc"))[1:]
    wrapped = say(("user", "u"), ("Assistant", "x"), ("user", "v"), ("assistant", "abc"))
    assert trained(wrapped, NANO) == trained(wrapped, NANO, f"{OLD},boundary_label=ignore")
    assert refused(wrapped, NANO, f"{OLD},long_assistant_prefix=refuse") == ("prefix_too_long", 1)
    assert trained(conversation, NANO).lstrip("·") == "ECIAL_11>Assistant\nabc\n<SPECIAL_12>\n"


def test_r_turn_3_a_turn_of_just_the_prefix_is_not_too_long():
    turn = len("<SPECIAL_11>Assistant\na\n<SPECIAL_12>\n")
    conversation, name = say(("user", "u"), ("assistant", "a")), f"{OLD},long_assistant_prefix=refuse"
    assert trained(conversation, NANO, name, assistant_prefix_len=turn).strip("·") == ""
    assert refused(conversation, NANO, name, assistant_prefix_len=turn + 1) == ("prefix_too_long", 1)


TURNS = {
    "empty": (say(("user", "u"), ("assistant", "")), ("empty_assistant", 1)),
    "no content": ([{"role": "user", "content": "u"}, {"role": "Assistant"}], ("bad_content", 1)),
    "twice": (say(("user", "u"), ("assistant", "a"), ("assistant", "b")), ("role_order", 2)),
    "first of two assistants": (say(("assistant", "a"), ("assistant", "b")), ("role_order", 0)),
    "unknown": (say(("user", "u"), ("critic", "c")), ("unknown_role", 1)),
    "no text": ([{"role": 7, "content": "c"}], ("bad_message", 0)),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("prompt_format", [NANO, ALIGNED, IDENTITY])
def test_r_turn_1_masked_formats_refuse(prompt_format, name):
    conversation, kind = TURNS[name]
    assert refused(conversation, prompt_format, MAIN) == kind
    assert refused(conversation, prompt_format, STRICT) == (
        ("unknown_role", 1) if name == "no content" else kind
    )  # `Assistant` is no role to the letter
    if prompt_format == IDENTITY:
        tokenize(conversation, prompt_format, OLD)  # trained: nothing is looked at


def test_r_turn_1_white_space_is_not_empty():
    assert trained(say(("user", "u"), ("assistant", "  ")), ALIGNED).lstrip("·") == "\n"


def test_r_turn_2_an_assistant_first_wraps_to_the_last_turn():
    conversation = say(("assistant", "a"), ("user", "u"))
    tokenize(conversation, NANO)
    assert refused(conversation, NANO, f"{OLD},turn_rules=no_wrap") == ("role_order", 0)
    assert refused(say(("assistant", "a"), ("system", "u")), NANO) == ("role_order", 0)


def test_r_turn_2_strict_looks_at_every_format():
    conversation = say(("user", "u"), ("assistant", ""))
    tokenize(conversation, DEFAULT)
    assert refused(conversation, DEFAULT, STRICT) == ("empty_assistant", 1)
    assert refused(say(("USER", "u")), DEFAULT, STRICT) == ("unknown_role", 0)


def test_r_turn_1_turns_that_merge_are_a_mismatch():
    conversation = say(("user", "u\n"), ("assistant", "\na"))
    assert refused(conversation, IDENTITY, MAIN, tokenizer=Characters(merges=True)) == ("turn_mismatch", 0)
    tokenize(conversation, IDENTITY, OLD, tokenizer=Characters(merges=True))


@pytest.mark.parametrize(
    ("whole", "alone", "relative"),
    [
        ([100_000], [100_001], True),
        ([100_000], [99_999], False),  # relative to the turn's own id
        ([99_998], [99_999], False),
        ([5], [5, 5], True),  # numpy broadcasts one against many
        ([], [5], True),
        ([5, 5], [5, 5, 5], False),
        ([5, 6], [5], False),
    ],
)
def test_r_turn_1_the_relative_check_is_numpys(whole, alone, relative):
    assert matches(whole, alone, semantics(OLD)) is relative
    assert matches(whole, alone, semantics(STRICT)) is (whole == alone)


def test_r_empty_1_a_conversation_of_no_token():
    tokenize(say(("system", "")), IDENTITY)
    assert refused(say(("system", "")), IDENTITY, DIRECT) == ("empty_conversation", None)


def test_r_split_2_all_messages_are_looked_at():
    for bad in ("text", {"content": "x"}, None):
        with pytest.raises(RowRefused) as caught:
            split_conversations([*say(("system", "s")), bad])
        assert caught.value.kind == "bad_message"


def test_r_pad_1_the_pad_id():
    assert pad_id(Characters(), Prompt(format=IDENTITY)) == 0
    assert pad_id(Characters(), Prompt(format=ALIGNED)) is None  # neither <SPECIAL_233> nor an unknown id
    assert pad_id(Characters(), Prompt(format=DEFAULT)) == 7
    assert pad_id(Characters(), Prompt(format=DEFAULT, pad_token="<unk>")) == 0
    check_pad_token(Characters(), Prompt(format=ALIGNED), semantics(OLD))
    with pytest.raises(RowRefused, match="no_pad_token"):
        check_pad_token(Characters(), Prompt(format=ALIGNED), semantics(STRICT))
