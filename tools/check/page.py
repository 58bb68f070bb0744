"""Write a certificate as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equivalence.report.templates import environment
from tools.check.result import PARTS
from tools.inspect_rows.inspection import Histogram
from tools.inspect_rows.page import NARROW, picture

_BADGES = {"proven": "good", "partial": "warn"}
_COUNTS = {
    "conversations": ("conversation", "conversations"),
    "kept": ("kept whole", "kept whole"),
    "truncated": ("cut", "cut"),
    "dropped": ("dropped", "dropped"),
    "truncated_tokens": ("token cut off", "tokens cut off"),
    "trained_tokens": ("trained token", "trained tokens"),
    "padding_tokens": ("padding", "padding"),
    "rows_unreadable": ("line that cannot be read", "lines that cannot be read"),
    "rows_refused": ("row refused", "rows refused"),
    "rows_that_train_nothing": ("row that trains nothing", "rows that train nothing"),
    "conversations_that_train_nothing": ("conversation that trains nothing", "conversations that train nothing"),
    "empty_conversations": ("conversation without a token", "conversations without a token"),
    "unrendered_messages": ("message that renders to nothing", "messages that render to nothing"),
    "unknown_keys": ("key passed over", "keys passed over"),
    "boundary_labels": ("label across a boundary", "labels across a boundary"),
    "hidden_segments": ("hidden segment", "hidden segments"),
    "control_tokens": ("control token in contents", "control tokens in contents"),
    "pad_labels": ("label that is the pad id", "labels that are the pad id"),
}
"""Titles of each count, for one and for several."""


def render_page(certified: Mapping[str, Any]) -> str:
    """Return the page of a certificate, which needs no network and no script."""
    template = environment("tools.check").get_template("page.html")
    file_part = certified["parts"].get("file")
    scans = file_part["numbers"].get("scans", []) if file_part else []
    return template.render(
        made=certified,
        badge=_BADGES.get(certified["verdict"], "bad"),
        titles=PARTS,
        scans=[{**scan, "plots": _plots(scan), "table": _counts(scan)} for scan in scans],
    )


def _counts(scan: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the counts that are not 0, and always those of every file."""
    always = ("conversations", "kept", "truncated", "dropped", "trained_tokens", "padding_tokens")
    counts = scan["counts"]
    return [
        (one if counts.get(name) == 1 else several, counts.get(name, 0))
        for name, (one, several) in _COUNTS.items()
        if name in always or counts.get(name)
    ]


def _plots(scan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the plots of an inspection, each for a wide screen and for a small one."""
    found = [Histogram(**each) for each in scan["histograms"]]
    return [(picture(each), picture(each, width=NARROW)) for each in found if each.count]
