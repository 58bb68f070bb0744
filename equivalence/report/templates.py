"""Load the templates of all HTML pages, those of the tools included: everything is escaped, and an unknown name is an error."""

from __future__ import annotations

import functools
from importlib.resources import files

import jinja2


def environment(package: str) -> jinja2.Environment:
    """Return the environment of the templates of a package, with the filter `thousands` and the common `style` of all pages."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(functools.partial(read_text, package)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["thousands"] = lambda number: f"{number:,}"
    made.globals["style"] = read_text("equivalence.report", "report.css")
    return made


@functools.cache
def read_text(package: str, name: str) -> str:
    """Read a text file beside the modules of a package."""
    return (files(package) / name).read_text(encoding="utf-8")
