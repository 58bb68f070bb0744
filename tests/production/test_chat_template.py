"""Chat templates rendered without `apply_chat_template` (R-RENDER-4): the same text, and the whole way where that is not known."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from production.errors import RowRefused
from production.tokens import chat_template as module
from production.tokens.chat_template import READ_CODE, TEXT_METHODS, ChatTemplate
from production.tokens.folder import load_folder
from production.tokens.prompts import render_template

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "tokenizers" / "nemotron-mini"
LOOP = "{%- for message in messages %}"
TEMPLATES = {
    "its own": None,
    "markers": LOOP + "<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}{% endfor %}{{ add_generation_prompt }}",
    "methods of text": LOOP + "{% if message['content'].startswith('a') and '/' in message.content %}{{ message['content'].split('/')[-1].lstrip('a ').upper() }}"
    "{% else %}{{ loop.index0 ~ message['content'].replace('b', 'cc').rstrip() }}{% endif %}{% endfor %}",
    "every method": LOOP + "".join(f"{{{{ message.content.{name} is defined }}}}{{{{ message.content.{name} is callable }}}}" for name in sorted(TEXT_METHODS)) + "{% endfor %}",
    "a macro and a namespace": "{% macro turn(m, last=false) %}[{{ m.role }}: {{ m.content.strip() }}{{ '' if last else ',' }}]{% endmacro %}{% set ns = namespace(n=0) %}"
    + LOOP + "{% set ns.n = ns.n + message.content.count('a') %}{{ turn(message, last=loop.last) }}{% endfor %}{{ ns.n }}",
    "format": LOOP + "{{ '{0.__class__} {0}'.format(message.content) }}{% endfor %}",
    "a mutation": LOOP + "{{ message.update({'content': 'x'}) }}{% endfor %}",
    "an underscored attribute": LOOP + "{{ message.content.__class__ }}|{{ message.content._x }}{% endfor %}",
    "a variable": LOOP + "{% set message = dict(message, content='x') %}{{ message }}{% endfor %}",
    "json, tools and unknown names": "{{ messages | tojson }}{{ tools }}{{ documents }}{{ nothing }}{{ return_assistant_token_mask }}{{ messages[0].missing }}",
    "an error": LOOP + "{% if 'a' in message.content %}{{ raise_exception('no ' + message.content) }}{% endif %}{{ message.content }}{% endfor %}",
    "a missing attribute's attribute": "{{ messages[0].missing.deeper }}",
    "no template": "{% for %}",
    "generation": LOOP + "{% generation %}{{ message.content.strip() }}{% endgeneration %}{% endfor %}",
    "a method of a literal": "{{ 'x'.join(['a', 'b']) }}{{ ', '.join(messages | map(attribute='role')) }}{{ 'aXb'.index('z') }}",
}  # fmt: skip

contents = st.lists(st.sampled_from(["a", "b", "/", " ", "\n", "é", "<", "{{", "%}", "{0}"]), max_size=6).map("".join)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"]), "content": contents}
)
hostile = st.one_of(
    messages,
    st.fixed_dictionaries({"content": contents, "role": st.just("user")}),
    st.fixed_dictionaries({"role": st.just("user")}, optional={"name": contents, "reasoning": contents}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.sampled_from([None, 1, ["a"], {"a": None}])}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": contents, "reasoning": st.sampled_from([None, "r"])}),
    st.fixed_dictionaries({"role": st.just("assistant"), "thinking": contents}),
)  # fmt: skip


@pytest.fixture
def tokenizer():
    return load_folder(TOKENIZER)


def outcome(render, *arguments):
    try:
        return render(*arguments)
    except RowRefused as error:
        return error.kind, error.what, error.conversation


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_apply_chat_template_renders_it(tokenizer, name):
    if TEMPLATES[name] is not None:
        tokenizer.chat_template = TEMPLATES[name]
    template = ChatTemplate(tokenizer)
    assert template.is_direct == (name != "no template")

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(messages, messages, hostile), min_size=1, max_size=5), st.integers(0, 3))
    def same(conversation, number):
        before = [dict(message) for message in conversation]
        assert outcome(template.render, conversation, number) == outcome(
            render_template, conversation, tokenizer, number
        )
        assert conversation == before

    same()


def test_plain_conversations_are_rendered_without_apply_chat_template(tokenizer, monkeypatch):
    template = ChatTemplate(tokenizer)
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = render_template(conversation, tokenizer, 0)
    monkeypatch.setattr(module, "render_template", lambda *_: "the whole way")
    assert template.render(conversation, 0) == expected
    assert template.render([conversation[0] | {"name": "x"}], 0) == "the whole way"


def test_libraries_whose_code_was_not_read_render_the_whole_way(tokenizer, monkeypatch):
    assert module.is_read_code(), "read what changed in the libraries, and note their digests in READ_CODE"
    for read in READ_CODE:
        module.is_read_code.cache_clear()
        with monkeypatch.context() as patch:
            patch.setitem(READ_CODE, read, "0" * 16)
            assert not ChatTemplate(tokenizer).is_direct
    module.is_read_code.cache_clear()


def test_a_tokenizer_with_its_own_way_to_render_keeps_it(tokenizer):
    class Own(type(tokenizer)):
        def apply_chat_template(self, *_, **__):
            return "own"

    tokenizer.__class__ = Own
    template = ChatTemplate(tokenizer)
    assert not template.is_direct
    assert template.render([{"role": "user", "content": "a"}], 0) == "own"


def test_the_table_of_methods_holds_text_methods_that_the_sandbox_allows():
    for name in TEXT_METHODS:
        assert callable(getattr(str, name))
    assert not TEXT_METHODS & {"format", "format_map", "join", "translate", "encode"}
