"""Where numbers go, how far a run is, how it went."""

import io
import json
import math
import re
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from production.errors import BadInput, PackproofError
from production.training.metrics import loggers as module
from production.training.metrics.loggers import (
    JsonLines,
    LoggerSettings,
    MlflowSettings,
    Record,
    WandbSettings,
    open_loggers,
    read_records,
)
from production.training.metrics.plot import COLUMNS, Line, draw, ticks
from production.training.metrics.progress import RunProgress, compact, duration
from production.training.metrics.step_numbers import StepNumbers
from production.training.metrics.summary import close_run, show, summarize, write_picture

RUN = {"model": "small", "tensor": 2}


def step(number, loss=1.5, **values):
    return Record(kind="step", step=number, values={"loss": loss, **values})


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain(folder, **changes):
    return LoggerSettings(folder=folder, tensorboard=None, **changes)


def test_r_record_2_every_step_is_in_the_file_before_the_next_begins(tmp_path):
    with open_loggers(plain(tmp_path), rank=0, run=RUN) as loggers:
        for number in (1, 2):
            loggers.log(step(number))
            last = lines_of(tmp_path)[-1]
            assert abs(last.pop("time") - time.time()) < 60
            assert last == {"kind": "step", "step": number, "loss": 1.5}
    first = lines_of(tmp_path)[0]
    assert first.pop("time") <= time.time() + 0.001
    assert first == {"kind": "run", "step": 0, "model": "small", "tensor": 2}


def test_other_ranks_write_nothing(tmp_path):
    with open_loggers(plain(tmp_path / "none"), rank=1, run=RUN) as loggers:
        loggers.log(step(1))
    assert not (tmp_path / "none").exists()


def test_r_record_1_nan_and_infinity_are_valid_json_and_are_read_back(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log(step(1, math.nan, a=math.inf, b=-math.inf, c=True, d="text", e=1e-300))
    lines.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"loss": "NaN", "a": "Infinity", "b": "-Infinity"' in text
    (found,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(found.values["loss"])
    assert {**found.values, "loss": 0, "time": 0} == {
        "time": 0,
        "loss": 0,
        "a": math.inf,
        "b": -math.inf,
        "c": True,
        "d": "text",
        "e": 1e-300,
    }


def test_a_loss_comes_back_to_the_bit(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    values = [0.1 + 0.2, 2.0955185890197754, 5e-324, 1.7976931348623157e308]
    for number, value in enumerate(values):
        lines.log(step(number, value))
    lines.close()
    assert [record.values["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == values


@pytest.mark.parametrize(
    ("tail", "cut", "kept"),
    [
        (b"", 0, 2),
        (b'{"kind": "step", "st', 20, 2),
        (b'{"kind": "step", "step": 3}', 0, 3),  # whole but for its end
        (b'"te', 3, 2),
        (b"x" * 200_000, 200_000, 2),
    ],
)
def test_r_record_2_a_line_cut_off_by_a_kill_is_fixed_on_resume(tmp_path, tail, cut, kept):
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(file)
    lines.log(step(1))
    lines.log(step(2))
    lines.close()
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    again = JsonLines(file)
    assert again.repaired == cut
    again.log(step(9))
    again.close()
    assert file.read_bytes().startswith(whole)
    assert [record.step for record in read_records(file)] == [*[1, 2, 3][:kept], 9]


def test_a_file_of_one_half_line_is_emptied(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind')
    JsonLines(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_reader_beside_the_run_leaves_the_line_being_written_out(tmp_path):
    (tmp_path / "m").write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    assert [record.step for record in read_records(tmp_path / "m")] == [1]


@pytest.mark.parametrize("line", ["[1]", "3", "{}", "no json"])
def test_a_line_that_is_not_a_record_is_refused_with_its_number(tmp_path, line):
    (tmp_path / "m").write_text('{"kind": "step", "step": 1}\n' + line + "\n")
    with pytest.raises(BadInput, match="line 2"):
        list(read_records(tmp_path / "m"))


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_and_a_resumed_run_overrides(tmp_path):
    settings = LoggerSettings(folder=tmp_path)
    with open_loggers(settings, rank=0, run=RUN) as loggers:
        for number in (1, 2, 3):
            loggers.log(step(number, float(number)))
    with open_loggers(settings, rank=0, run=RUN, finished_steps=1) as loggers:
        loggers.log(step(2, 20.0))
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 1.0), (2, 20.0)]
    with open_loggers(settings, rank=0, run=RUN) as loggers:  # one that had no checkpoint yet begins again
        loggers.log(step(1, 10.0))
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 10.0)]


def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch):
    # In a process of its own: W&B leaves hooks and a service behind.
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    code = (
        "import sys, pathlib\n"
        "from production.training.metrics.loggers import *\n"
        "settings = LoggerSettings(folder=pathlib.Path(sys.argv[1]), tensorboard=None, "
        "wandb=WandbSettings(project='packproof', name='one', mode='offline'))\n"
        "with open_loggers(settings, rank=0, run={'tensor': 2}) as loggers:\n"
        "    for step in (1, 2):\n"
        "        loggers.log(Record(kind='step', step=step, values={'loss': 0.625 * step}))\n"
        "assert 'wandb' in sys.modules and not loggers.others\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = run.read_bytes()
    for expected in (b"packproof", b"one", b"loss", b"0.625", b"1.25"):
        assert expected in content


class FakeClient:
    """MLflow's client as far as it is called; the real one was tried once by hand, it is no dependency of the suite."""

    experiment = tags = None

    def __init__(self, tracking_uri):
        self.calls = [("client", tracking_uri)]
        FakeClient.last = self

    def get_experiment_by_name(self, name):
        self.calls.append(("find", name))
        return FakeClient.experiment

    def create_experiment(self, name):
        self.calls.append(("make", name))
        return "7"

    def create_run(self, experiment_id, run_name=None, tags=None):
        self.calls.append(("run", experiment_id, run_name))
        FakeClient.experiment = types.SimpleNamespace(experiment_id=experiment_id)
        FakeClient.tags = tags
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def log_batch(self, run_id, metrics=(), params=()):
        self.calls.append((run_id, [(m.key, m.value, m.step) for m in metrics], [(p.key, p.value) for p in params]))

    def search_runs(self, experiment_ids, filter_string, max_results):
        assert (experiment_ids, max_results) == (["7"], 1)
        found = [f"tags.`{name}` = '{value}'" for name, value in (FakeClient.tags or {}).items()]
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
        return [run] if filter_string in found else []

    def update_run(self, run_id, status):
        self.calls.append(("goes on", run_id, status))

    def set_terminated(self, run_id):
        self.calls.append(("ended", run_id))


def fake_mlflow():
    def metric(key, value, timestamp, step):
        assert timestamp > 1e12
        return types.SimpleNamespace(key=key, value=value, step=step)

    entities = types.SimpleNamespace(
        Metric=metric, Param=lambda key, value: types.SimpleNamespace(key=key, value=value)
    )
    return types.SimpleNamespace(MlflowClient=FakeClient, entities=entities)


def test_mlflow_continues_the_run_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow())
    monkeypatch.setattr(FakeClient, "experiment", None)
    begun = {}
    for name, facts in (("one", RUN), ("one", {**RUN, "model": "resumed"}), ("two", RUN)):
        settings = plain(tmp_path, mlflow=MlflowSettings(tracking_uri="u", experiment="e", run=name))
        with open_loggers(settings, rank=0, run=facts, finished_steps=len(begun)) as loggers:
            loggers.log(step(1, 1.0))
        begun[len(begun)] = FakeClient.last.calls
    first, resumed, other = begun.values()
    assert ("run", "7", None) in first
    assert ("run", "7", None) in other
    assert ("run", "7", None) not in resumed
    assert ("goes on", "r1", "RUNNING") in resumed
    assert all(not params for call in resumed if call[0] == "r1" for params in call[2:])
    assert resumed[-1] == ("ended", "r1")


def test_mlflow_is_called_with_facts_numbers_and_an_end(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow())
    monkeypatch.setattr(FakeClient, "experiment", None)
    settings = plain(tmp_path, mlflow=MlflowSettings(tracking_uri="u", experiment="e", run_name="n"))
    with open_loggers(settings, rank=0, run=RUN) as loggers:
        loggers.log(step(1, math.nan, text="left out"))
    calls = FakeClient.last.calls
    assert calls[:5] == [
        ("client", "u"),
        ("find", "e"),
        ("make", "e"),
        ("run", "7", "n"),
        ("r1", [], [("model", "small"), ("tensor", "2")]),
    ]
    (name, value, at) = calls[6][1][0]
    assert (name, math.isnan(value), at, len(calls[6][1])) == ("loss", True, 1, 1)
    assert calls[-1] == ("ended", "r1")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wandb", {"wandb": WandbSettings(project="p")}),
        ("mlflow", {"mlflow": MlflowSettings(tracking_uri="u", experiment="e")}),
    ],
)
def test_a_logger_whose_package_is_missing_is_refused_with_the_extra_to_install(tmp_path, monkeypatch, name, settings):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackproofError, match=rf"packproof\[{name}\]"):
        open_loggers(plain(tmp_path, **settings), rank=0, run=RUN)


@pytest.mark.parametrize(
    ("name", "started", "settings", "fix"),
    [
        ("wandb", "init", {"wandb": WandbSettings(project="p")}, "`wandb login`"),
        ("mlflow", "MlflowClient", {"mlflow": MlflowSettings(tracking_uri="u", experiment="e")}, "tracking_uri"),
    ],
)
def test_a_logger_that_cannot_start_is_refused_by_its_key(tmp_path, monkeypatch, name, started, settings, fix):
    class UsageError(Exception):
        """Of wandb's own kind: no error of ours."""

    def refuses(**_):
        raise UsageError("No API key configured.")

    package = types.SimpleNamespace(**{started: refuses, "Settings": dict})
    monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(PackproofError, match=f"{name} cannot start: UsageError: No API key configured") as caught:
        open_loggers(plain(tmp_path, **settings), rank=0, run=RUN)
    assert caught.value.where == f"logger.{name}_enabled"
    assert fix in caught.value.fix


def test_event_files_that_cannot_be_begun_are_refused_by_their_key(tmp_path):
    (tmp_path / "events").write_text("a file")
    settings = LoggerSettings(folder=tmp_path, tensorboard="events")
    with pytest.raises(PackproofError, match="tensorboard cannot start: FileExistsError") as caught:
        open_loggers(settings, rank=0, run=RUN)
    assert caught.value.where == "logger.tensorboard_enabled"


def test_a_logger_that_fails_later_is_reported_once_and_the_file_continues(tmp_path):
    class Broken:
        def log(self, record):
            raise ConnectionError(f"server gone at step {record.step}")

        def close(self):
            raise AssertionError("not asked again")

    said = []
    with open_loggers(plain(tmp_path), rank=0, run=RUN) as loggers:
        loggers.say = said.append
        loggers.others["mlflow"] = Broken()
        loggers.log(step(1))
        loggers.log(step(2))
    assert len(said) == 1
    assert "server gone" in said[0]
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2]


def test_a_file_that_cannot_be_written_ends_the_run(tmp_path):
    loggers = open_loggers(plain(tmp_path), rank=0, run=RUN)
    loggers.close()
    with pytest.raises(ValueError, match="closed file"):
        loggers.log(step(1))


def report(number, **changes):
    given = {
        "step": number,
        "loss": 2.0 / number,
        "all_masked": False,
        "mtp_losses": (3.0 / number,),
        "gradient_norm": 0.5,
        "learning_rate": 1e-4,
        "consumed_samples": 4 * number,
        "step_seconds": 2.0,
        "data_wait_seconds": 0.1,
        "data_wait_rank": 0,
        "tokens_per_second": 64_000.0,
        "trained_tokens": 50_000,
        "tokens": 128_000,
        "padding_share": 0.25,
        "rows_truncated": 1,
        "conversations_dropped": 2,
        "conversations_masked_out": number - 1,
        "slowest_rank": 0,
        "slowest_rank_place": (0, 0, 0, 0),
        "slowest_rank_behind_seconds": 0.0,
        "memory_mebibytes": 512.0,
        "memory_rank": 0,
    }
    return StepNumbers(**given | changes)


def console(**options):
    return Console(file=io.StringIO(), width=160, **options)


def test_progress_is_plain_lines_where_there_is_no_terminal():
    screen = console()
    with RunProgress(total_steps=100, console=screen) as progress:
        progress.step(report(1))
        progress.step(report(2, mfu=0.4))
        progress.say("validation loss 1.9")
    lines = screen.file.getvalue().splitlines()
    assert lines[0].startswith("step 1/100  loss 2.0000  mtp 1 3.0000  gradient norm 0.5  2.0 s a step  64 k tokens/s")
    assert lines[0].endswith("3 min 18 s left")
    assert "MFU 40.0%  3 min 16 s left" in lines[1]
    assert lines[2] == "validation loss 1.9"
    assert "\x1b" not in screen.file.getvalue()


def test_plain_lines_come_at_intervals_and_the_last_step_is_always_printed():
    now = iter([0.0, 1.0, 6.0, 6.5])
    screen = console()
    with RunProgress(total_steps=4, console=screen, plain_every_seconds=5.0, clock=lambda: next(now)) as progress:
        for number in (1, 2, 3, 4):
            progress.step(report(number))
    assert re.findall(r"step (\d)/4", screen.file.getvalue()) == ["1", "3", "4"]


def test_progress_on_a_terminal_is_one_bar_with_the_time_left():
    screen = console(force_terminal=True)
    with RunProgress(total_steps=10, finished_steps=4, console=screen) as progress:
        progress.step(report(5))
    text = screen.file.getvalue()
    assert "step 5/10" in text
    assert "10.0 s left" in text
    assert text.count("\n") <= 2


def test_without_its_bar_progress_still_prints_messages():
    for options in ({}, {"force_terminal": True}):
        screen = console(**options)
        with RunProgress(total_steps=10, bar=False, console=screen) as progress:
            progress.step(report(1))
            progress.say("hello")
        assert screen.file.getvalue().strip() == "hello"


def test_other_ranks_print_nothing():
    for options in ({}, {"force_terminal": True}):
        screen = console(**options)
        with RunProgress(total_steps=10, rank=3, console=screen) as progress:
            progress.step(report(1))
            progress.say("hello")
        assert screen.file.getvalue() == ""


def test_durations_and_rates_are_printed_in_readable_units():
    assert [duration(each) for each in (0.012, 5.25, 61, 3 * 3600 + 60, 60 * 3600)] == [
        "12 ms",
        "5.2 s",
        "1 min 01 s",
        "3 h 01 min",
        "2 d 12 h",
    ]
    assert [compact(each) for each in (7.0, 1234.0, 2.5e6, 3e9)] == ["7", "1.23 k", "2.5 M", "3 G"]


def finished_run(folder):
    with open_loggers(plain(folder), rank=0, run=RUN) as loggers:
        for number in (1, 2, 3, 4):
            seconds = 9.0 if number == 1 else 2.0
            found = report(number, step_seconds=seconds, tflops_per_second=100.0 + number)
            loggers.log(Record(kind="step", step=number, values=found.values()))
        loggers.log(Record(kind="validation", step=4, values={"validation_loss": 9.0}))
    with open_loggers(plain(folder), rank=0, run=RUN, finished_steps=2) as loggers:
        for number in (3, 4, 5):
            slowest = (1, (1, 0, 0, 0)) if number == 4 else (6, (0, 1, 0, 1))
            found = report(
                number,
                step_seconds=3.0,
                loss=math.nan if number == 4 else 0.25,
                slowest_rank=slowest[0],
                slowest_rank_place=slowest[1],
                slowest_rank_behind_seconds=number / 4,
                memory_mebibytes=600.0 - number,
                memory_rank=number,
            )
            loggers.log(Record(kind="step", step=number, values=found.values()))
        loggers.log(Record(kind="validation", step=5, values={"validation_loss": 0.75}))


def test_a_summary_counts_steps_that_were_run_again_once(tmp_path):
    finished_run(tmp_path)
    found = summarize(read_records(tmp_path / "metrics.jsonl"))
    assert (found.steps, found.starts, found.not_finite) == (5, 2, [4])
    assert [at for at, _ in found.losses] == [1, 2, 3, 4, 5]
    assert found.losses[2] == (3, 0.25)
    assert found.validation_losses == [(5, 0.75)]
    assert found.seconds == 9 + 2 + 3 + 3 + 3
    assert found.median_step_seconds == 3.0  # steps 1 and 3 began a start
    assert found.trained_tokens == 250_000
    assert (found.rows_truncated, found.conversations_dropped, found.consumed_samples) == (5, 10, 20)
    assert found.padding_share == 0.25
    assert found.conversations_masked_out == 0 + 1 + 2 + 3 + 4
    assert found.tflops_per_second == 101.5
    assert (found.memory_mebibytes, found.memory_rank) == (597.0, 3)
    # At step 3 and 5; ties go to the rank that was slowest first, here rank 0 of steps 1 and 2.
    assert (found.slowest_rank, found.slowest_rank_steps) == (0, 2)


def test_the_summary_names_the_rank_that_most_steps_were_slowest_on_with_its_place(tmp_path):
    finished_run(tmp_path)
    records = [each for each in read_records(tmp_path / "metrics.jsonl") if each.kind != "step" or each.step > 2]
    found = summarize(records)
    assert (found.slowest_rank, found.slowest_rank_place, found.slowest_rank_steps) == (6, "tp 0, cp 1, dp 0, pp 1", 2)
    assert found.slowest_rank_behind_seconds == (3 + 5) / 2 / 4
    screen = console()
    show(found, screen, folder=tmp_path)
    text = screen.file.getvalue()
    assert "6 (tp 0, cp 1, dp 0, pp 1) at 2 steps, 1.0 s behind the mean (median)" in text
    assert "597 MiB a rank at most, on rank 3" in text


def test_records_that_name_no_rank_have_a_summary_without_one(tmp_path):
    old = {name: value for name, value in report(1).values().items() if "rank" not in name}
    found = summarize([Record(kind="step", step=1, values=old)])
    assert (found.slowest_rank, found.memory_rank, found.slowest_rank_steps) == (None, None, 0)
    screen = console()
    show(found, screen, folder=tmp_path)
    assert "slowest" not in screen.file.getvalue()


def test_a_run_closes_with_a_table_and_a_picture(tmp_path):
    finished_run(tmp_path)
    screen = console()
    close_run(tmp_path, screen)
    text = screen.file.getvalue()
    for expected in (
        "5, started 2 times",
        "2.0000 at step 1, 0.2500 at step 5",
        "the device's peak is not known: no MFU",
        "no finite loss at steps 4",
        "0.7500 at step 5",
    ):
        assert expected in text
    drawn = ET.parse(tmp_path / "loss.svg").getroot()
    assert drawn.tag.endswith("svg")
    assert "validation loss" in (tmp_path / "loss.svg").read_text()


def test_a_run_without_a_step_says_so(tmp_path):
    with open_loggers(plain(tmp_path), rank=0, run=RUN):
        pass
    screen = console()
    assert close_run(tmp_path, screen) is None
    assert "no step was finished" in screen.file.getvalue()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.13, 2.41, [2.1, 2.15, 2.2, 2.25, 2.3, 2.35, 2.4, 2.45]),
        (-1e-9, 4e-9, [-1e-9, 0, 1e-9, 2e-9, 3e-9, 4e-9]),
    ],
)
def test_axes_have_round_numbers_around_the_values(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-12])
def test_axes_of_one_value_have_room_around_it(value):
    found = ticks(value, value)
    assert found[0] < value < found[-1]
    assert len(found) <= 12


def test_a_plot_keeps_spikes_of_a_long_run_and_marks_nan():
    points = [(float(at), 1.0) for at in range(100_000)]
    points[54_321] = (54_321.0, 50.0)
    points[70_000] = (70_000.0, math.nan)
    text = draw([Line(name="loss & more", points=points)], title="a < b", x_title="step", y_title="loss")
    ET.fromstring(text)
    assert len(text) < 60_000
    (top,) = [y for y in re.findall(r"[ML][\d.]+ ([\d.]+)", text) if float(y) < 40]
    assert float(top) == 34.0  # 50 is the highest tick
    assert "nan at 70000" in text
    assert text.count("<path") == 2
    assert COLUMNS < 1000


def test_a_picture_of_nothing_is_still_one(tmp_path):
    ET.fromstring(draw([], title="t", x_title="x", y_title="y"))
    one = summarize([step(1, 1.0, step_seconds=1.0)])
    write_picture(one, tmp_path / "deep" / "one.svg")
    assert "<circle" in (tmp_path / "deep" / "one.svg").read_text()


def test_names_for_nan_and_infinity_are_the_documented_ones():
    assert list(module.NOT_NUMBERS) == ["NaN", "Infinity", "-Infinity"]


def test_a_series_of_zeros_lies_on_the_axis():
    flat = Line(name="difference", points=[(1.0, 0.0), (2.0, 0.0)])
    labels = re.findall(r">(-?[0-9.]+)</text>", draw([flat], title="", x_title="", y_title="", from_zero=True))
    assert {"0", "1"} <= set(labels)
    assert not [each for each in labels if each.startswith("-")]
