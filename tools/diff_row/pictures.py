"""Makes the README's two pictures from the shipped sample: `python -m tools.diff_row.pictures [--chromium PATH]`.

Each shows a fault that was met in real training: a boundary label (terminal), a trained role header (page).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.terminal_theme import MONOKAI

from equivalence.subjects import Messages, RowSettings, load
from equivalence.subjects.tokenizers import load_folder
from production.files.source import open_source
from tools.diff_row.errors import BadInput
from tools.diff_row.inputs import findings_of
from tools.diff_row.render.page import render_page
from tools.diff_row.render.terminal import show
from tools.diff_row.report import Report
from tools.diff_row.row.findings import Findings, Side, Source
from tools.diff_row.sides import version_of

SAMPLE = Path("examples/packed/sample.jsonl.packed")
TOKENIZER = Path("examples/tokenizers/nemotron-mini")
JOB = "my_job"
"""Side at fault, in place of a user's own loader."""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=10000",
]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Folders for the pictures."""

    chromium: str = "chromium"
    """The browser that draws."""
    out: Path = Path("docs/images")
    """Folder for the pictures."""
    row: int = 174
    """The row of the sample."""


def main(arguments: list[str] | None = None) -> int:
    """Draw both pictures."""
    asked = tyro.cli(Arguments, args=arguments, description=__doc__)
    if shutil.which(asked.chromium) is None:
        print(f"there is no browser {asked.chromium!r}: install chromium, or name one with --chromium", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    with open_source([SAMPLE]) as source:
        messages = source[asked.row]
    identity = RowSettings(pack_length=2048, prompt_format="identity")
    leaking = identity.replace(semantics="megatron-lm-0.19,boundary_label=ignore")
    _draw_terminal(_findings(messages, identity, leaking, asked.row), asked)
    nano = RowSettings(pack_length=2048, prompt_format="nemotron-nano-v2")
    _draw_page(_findings(messages, nano, nano.replace(assistant_prefix_len=0), asked.row), asked)
    return 0


def _findings(messages: Messages, settings: RowSettings, faulty: RowSettings, row: int) -> Findings:
    """Compare the reference, the installed Megatron-LM, and a job with different loader settings."""
    tokenizer = load_folder(TOKENIZER)
    sides = []
    for name in ("reference", "megatron_lm"):
        subject = load(name)
        built = subject.build_row(messages, tokenizer, settings)
        sides.append(Side(name=name, version=version_of(subject, name), row=built))
    sides.append(Side(name=JOB, version="", row=load("reference").build_row(messages, tokenizer, faulty)))
    if any(side.row.refusal for side in sides):
        raise BadInput(f"row {row} of {SAMPLE} is refused, so it makes no picture: choose another with --row")
    return findings_of(
        sides,
        source=Source(file=str(SAMPLE), row=row),
        messages=messages,
        settings=settings,
        tokenizer=tokenizer,
        tokenizer_name=str(TOKENIZER),
    )


def _draw_terminal(findings: Findings, asked: Arguments) -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    show(Report(row=findings), console)
    svg = console.export_svg(title=f"packproof-diff-row {SAMPLE} --row {findings.source.row} …", theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "Noto Sans Mono")
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    width, height = (round(float(size)) for size in found.groups())
    html = f'<body style="margin:0;background:#fff">{svg}</body>'
    _shoot(html, asked.out / "diff_row_terminal.png", width, height, asked)


def _draw_page(findings: Findings, asked: Arguments) -> None:
    _shoot(render_page(Report(row=findings)), asked.out / "diff_row_page.png", 1280, 860, asked)


def _shoot(html: str, picture: Path, width: int, height: int, asked: Arguments) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        where = [
            f"--user-data-dir={folder}/profile",
            f"--screenshot={picture.resolve()}",
            f"--window-size={width},{height}",
        ]
        command = [asked.chromium, *FLAGS, *where, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)  # noqa: S603 - the user names the browser
    print(f"{picture}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
