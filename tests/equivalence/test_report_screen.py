"""What a run of the suite says: differences by kind, no rate of what was not timed, and time left of the work alone."""

from pathlib import Path

import pytest
from rich.console import Console

from equivalence.report import terminal
from equivalence.report.html import write_html
from equivalence.report.summary import alike, summarise
from equivalence.runner.counters import Differing
from equivalence.runner.outcome import Options, Outcome


def differing(number, *, tensor="gradient of layer 3", kind="other", check="models", right="production"):
    return Differing(
        check=check,
        prompt_format="any",
        left="reference",
        right=right,
        first={"tensor": tensor, "position": None, "left": 1, "right": 2, "class": kind},
        count=4,
        classes={kind: 4},
        where=f"case {number}",
        command=f"show {number}",
    )


def outcome(*differences, **counts):
    options = Options(
        size="tiny",
        seed=0,
        shard=(1, 1),
        subjects=("reference", "production"),
        workers=2,
        sample=None,
        tokenizer="word",
        pack_length=64,
        out=Path("out"),
        rows=None,
    )
    found = Outcome(options=options, witnesses=[], stopped=True, **counts)
    found.tally.differences = list(differences)
    return found


def screen(summary, width=160):
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115 - as long as the test
    terminal.show(summary, console, [])
    return console.export_text()


SEVERAL = [
    differing(0, check="paths"),
    *(differing(number, tensor=f"gradient of layer {number}") for number in range(1, 7)),
    differing(7, tensor="gradient of layer 1", kind="failed"),
    differing(8, right="megatron_lm"),
]


def test_differences_of_one_kind_stand_together_the_largest_kind_first():
    kinds = alike(summarise(outcome(*SEVERAL), "run")["differences"])
    assert [[each["where"] for each in kind] for kind in kinds] == [
        [f"case {number}" for number in range(1, 7)],
        ["case 0"],
        ["case 7"],
        ["case 8"],
    ]


def test_one_kind_is_counted_as_one():
    alike_ones = [differing(number, tensor=f"gradient of layer {number}") for number in range(1, 4)]
    assert "3 differing cases of 1 kind; the first of each:" in screen(summarise(outcome(*alike_ones), "run"))


def test_the_screen_and_the_page_show_the_first_of_each_kind(tmp_path):
    summary = summarise(outcome(*SEVERAL), "run")
    text = screen(summary)
    assert "9 differing cases of 4 kinds; the first of each:" in text
    assert text.count("differs: ") == 4
    assert "show 1\n         and 5 more like it, in the page" in text
    assert "show 2" not in text
    write_html(summary, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "9 cases of 4 kinds" in page
    assert page.count('<div class="finding">') == 4
    assert "<summary>5 more like it</summary>" in page
    assert all(f"show {number}" in page for number in range(9))
    one = screen(summarise(outcome(SEVERAL[0]), "run"))
    assert "kinds" not in one
    assert "show 0" in one


def test_a_run_that_ended_before_any_row_was_timed_reports_no_rate(tmp_path):
    early = outcome(SEVERAL[0])
    assert "no generated rows, 0 s in all" in screen(summarise(early, "run"))
    early.tally.rows["rows", "identity"] = 40  # replayed, not timed
    early.tally.messages = 400
    summary = summarise(early, "run")
    text = screen(summary)
    assert "40 generated rows of 10 messages, 0 s in all" in text
    assert "rows/s" not in text
    write_html(summary, tmp_path / "report.html")
    assert "<b>–</b>generated rows a second" in (tmp_path / "report.html").read_text()
    early.tally.seconds["generated"] = 4.0
    assert "20 rows/s" in screen(summarise(early, "run"))


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])

    def at(seconds):
        now[0] = float(seconds)

    return at


def said(reporter, found, *, done):
    found.done = done
    reporter("", found)
    return reporter._said(found)


def test_remaining_time_ignores_the_time_before_the_work(clock):
    reporter, found = terminal.Reporter(Console(file=Path("/dev/null").open("w"))), outcome(planned=1000.0)  # noqa: SIM115
    clock(80)  # imports and tokenizers
    assert "left" not in said(reporter, found, done=0)
    clock(90)
    assert "left" not in said(reporter, found, done=50), "the first pieces say little of the rest"
    clock(100)
    assert "20 %, about 53 s left" in said(reporter, found, done=200)
    assert "in 1 min 40 s" in said(reporter, found, done=200), "what has passed is told in whole"


def test_time_left_follows_the_pace_of_the_later_half(clock):
    reporter, found = terminal.Reporter(Console(file=Path("/dev/null").open("w"))), outcome(planned=1000.0)  # noqa: SIM115
    for seconds, done in ((0, 0), (100, 50), (110, 100), (120, 150), (130, 200)):
        clock(seconds)
        text = said(reporter, found, done=done)
    # From half of what is done on, 100 in 20 seconds: 800 more take 160.
    assert "about 2 min 40 s left" in text
