"""Shows one packed row as two or more sides build it, and the first place where they differ, on one screen or page."""

from __future__ import annotations

from tools.diff_row.dump import write_dump
from tools.diff_row.dump_reader import Dump, read_dump
from tools.diff_row.findings import Findings, compare
from tools.diff_row.page import render_page

__all__ = ["Dump", "Findings", "compare", "read_dump", "render_page", "write_dump"]
