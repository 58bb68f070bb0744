"""Show the resolved configuration as plain values, and as YAML that names the source of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from production.training.config.schema.job import Job, Source
from production.training.config.schema.plain import plain

_PLAIN_WORD = re.compile(r"[A-Za-z_/][\w/.\-]*")
_OTHERWISE_READ = {"true", "false", "null", "yes", "no", "on", "off"}


def print_config(job: Job) -> str:
    """Return the job as YAML that loads to the same job; each value is followed by `default`, `file:line`, the
    override, or its derivation.
    """
    lines = list(_lines(plain(job), "", 0, _sources(job)))
    width = min(72, max(len(text) for text, _ in lines))
    return "".join(f"{text:<{width}}  # {comment}\n" if comment else f"{text}\n" for text, comment in lines)


def _sources(job: Job) -> dict[str, Source]:
    """Return sources by the printed key: a dataset that stands alone in the file is the first of a list here."""
    found = dict(job.sources)
    for split in ("train", "validation"):
        prefix = f"data.{split}."
        for key, source in job.sources.items():
            if key.startswith(prefix):
                found[f"data.{split}[0].{key[len(prefix) :]}"] = source
    return found


def _lines(values: Any, key: str, depth: int, sources: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    indent = "  " * depth
    for name, value in values.items():
        full = f"{key}.{name}" if key else name
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(value, full, depth + 1, sources)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            yield f"{indent}{name}:", ""
            for index, each in enumerate(value):
                inner = list(_lines(each, f"{full}[{index}]", depth + 2, sources))
                first = "  " * (depth + 1) + "- " + inner[0][0].lstrip()
                yield first, inner[0][1]
                yield from inner[1:]
        else:
            yield f"{indent}{name}: {_written(value)}", _comment(full, sources)


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        is_plain = _PLAIN_WORD.fullmatch(value) and value.lower() not in _OTHERWISE_READ
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(_written(each) for each in value)}]"
    return "{}" if isinstance(value, Mapping) else repr(value)


def _comment(key: str, sources: Mapping[str, Source]) -> str:
    around = key
    while around not in sources:  # a value inside a list or a file's path has the place of what it stands in
        if not around.endswith(("]", ".path", ".weight", ".data_path")):
            return "default"
        around = around.rpartition("[" if around.endswith("]") else ".")[0]
    source = sources[around]
    if source.kind == "derived":
        return f"derived from {source.place}"
    written = f", from {source.expression}" if source.expression else ""
    return (source.place or "default") + written
