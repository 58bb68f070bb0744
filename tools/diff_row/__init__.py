"""Show one packed row as two or more sides build it, and the first place where they differ, on one screen or page."""

from __future__ import annotations

from tools.diff_row.dump.batch_reader import Dump, read_dump
from tools.diff_row.dump.writer import write_dump
from tools.diff_row.render.page import render_page
from tools.diff_row.report import Report
from tools.diff_row.row.findings import Findings, compare

__all__ = ["Dump", "Findings", "Report", "compare", "read_dump", "render_page", "write_dump"]
