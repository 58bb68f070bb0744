"""Render conversations through a tokenizer's chat template, at half of what `apply_chat_template` takes and with the same text.

`apply_chat_template` copies each value of each message three times before it renders, and jinja's sandbox asks of each
method of text whether it is safe. Both are left out where their outcome is known: for messages of a role and a
content that are text, with the versions of the libraries whose code was read for it. Everything else goes the whole way.

Reference: `reference/prompts.py`, R-RENDER-4.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import BuiltinMethodType
from typing import Any

import jinja2.environment
import jinja2.runtime
import jinja2.sandbox
import transformers.tokenization_utils_base
import transformers.utils.chat_template_utils
import xxhash
from transformers import PreTrainedTokenizerBase

from production.tokens.prompts import Conversation, render_template

READ_CODE = {
    transformers.tokenization_utils_base: "98b615b19724d883",
    transformers.utils.chat_template_utils: "d3bcf74b867dea16",
    jinja2.sandbox: "d0392e097513abb6",
    jinja2.environment: "6683e390e0a77fd2",
    jinja2.runtime: "c560eb067185f92b",
}
"""The modules whose steps are left out, with the xxh3-64 of the source that was read (transformers 5.24.0, jinja2 3.1.6)."""

TEXT_METHODS = frozenset(
    {
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit"),
        *("islower", "isspace", "istitle", "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("swapcase", "title", "upper"),
    }
)
"""Methods of text that the sandbox always allows, that change nothing, and that call nothing of the template's."""


class ChatTemplate:
    """Renders conversations with the template that the tokenizer has now. The tokenizer must not be changed afterwards."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.chat_template
        self._template: Any = None
        self._variables: dict[str, Any] = {}
        if type(self._source) is str and self._source and _is_plain(tokenizer) and is_read_code():
            self._variables = dict(tokenizer.special_tokens_map)
            self._template = _compiled(self._source)

    @property
    def is_direct(self) -> bool:
        """Return whether the template is rendered without `apply_chat_template` where messages allow it."""
        return self._template is not None

    def render(self, conversation: Conversation, number: int) -> str:
        """Return the text of a conversation, as `prompts.render_template` does; RowRefused as there."""
        if self._template is None or not _has_texts_only(conversation):
            return render_template(conversation, self._tokenizer, number)
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in conversation],
                tools=None,
                documents=None,
                add_generation_prompt=False,
                return_assistant_token_mask=False,
                **self._variables,
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes, and the whole way says it as it always does
            return render_template(conversation, self._tokenizer, number)
        return text


@functools.cache
def is_read_code() -> bool:
    """Return whether the installed libraries are the ones whose steps are left out."""
    return all(source_digest(module) == digest for module, digest in READ_CODE.items())


def source_digest(module: Any) -> str:
    """Return the xxh3-64 of a module's source; empty where the source is not at hand."""
    path = Path(module.__file__ or "")
    return xxhash.xxh3_64_hexdigest(path.read_bytes()) if path.suffix == ".py" and path.is_file() else ""


def _is_plain(tokenizer: Any) -> bool:
    """Return whether the tokenizer renders with transformers' own methods."""
    names = ("apply_chat_template", "get_chat_template", "special_tokens_map")
    return isinstance(tokenizer, PreTrainedTokenizerBase) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerBase, name) for name in names
    )


def _has_texts_only(conversation: Sequence[Any]) -> bool:
    """Return whether each message is an object of a role and a content, both text, of which the steps left out change nothing."""
    try:
        for message in conversation:
            if type(message) is not dict or len(message) != 2:
                return False
            if type(message["role"]) is not str or type(message["content"]) is not str:
                return False
    except KeyError:
        return False
    return bool(conversation)


class _QuickSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which says of the methods of text at once what it would find out."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is str and attribute in TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja's
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str and __obj.__name__ in TEXT_METHODS:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """Return the template compiled in transformers' environment, with the sandbox made quick; None for one that does not compile."""
    try:
        own = transformers.utils.chat_template_utils._compile_jinja_template(source).environment  # noqa: SLF001
    except Exception:  # noqa: BLE001 - it is refused where it is rendered
        return None
    quick = own.overlay()
    quick.__class__ = _QuickSandbox
    template = quick.from_string(source)
    template.globals = dict(template.globals)  # a chain of mappings, which each rendering would copy key by key
    return template
