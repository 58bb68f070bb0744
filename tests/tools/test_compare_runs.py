"""Two recorded runs against each other: every reader, the published numbers, the ways out."""

import csv
import datetime as dt
import inspect
import json
import math
import re
import struct
from dataclasses import replace

import pytest
from rich.console import Console

from equivalence.errors import InputError
from production.training.metrics.loggers import LoggerSettings, Record, open_loggers
from tools.compare_runs import page as page_module
from tools.compare_runs.__main__ import main
from tools.compare_runs.comparison import Window, compare
from tools.compare_runs.paired import paired_ratio, student_quantile
from tools.compare_runs.readers import Names, read_run
from tools.compare_runs.recorded import broken_limits
from tools.compare_runs.run import FLOAT32, Precision, Run, shifted
from tools.compare_runs.words import time_rows, verdict

LOSSES = {step: 2.0 + 1 / step for step in range(1, 24)}
TIMES = {step: 50.0 + step % 3 for step in range(1, 24)}

# The pieces of the line that megatron.training.training.training_log prints, as its source has them.
PIECES = (
    " iteration {:8d}/{:8d} |",
    " consumed samples: {:12d} |",
    " elapsed time per iteration (ms): {:.1f} |",
    " learning rate: {learning_rate:.6E} |",
    " global batch size: {batch_size:5d} |",
    " {}: {:.6E} |",
    " loss scale: {loss_scale:.1f} |",
    " grad norm: {grad_norm:.3f} |",
    " number of skipped iterations: {:3d} |",
    " number of nan iterations: {:3d} |",
)


CLOCK = [dt.datetime(2026, 11, 29, 10, tzinfo=dt.UTC)]


def log_line(step, loss, seconds, *, skipped=0, mtp=()):
    """A line of a driver before 0.16, whose lines each stand for their own iterations, and whose times have no fractions."""
    CLOCK[0] += dt.timedelta(seconds=seconds)
    iteration, samples, elapsed, rate, batch, named, scale, norm, skips, nans = PIECES
    losses = [("lm loss", loss), *((f"mtp_{depth} loss", value) for depth, value in enumerate(mtp, 1))]
    return (
        f" [{CLOCK[0]:%Y-%m-%d %H:%M:%S}]"
        + iteration.format(step, 200)
        + samples.format(64 * step)
        + elapsed.format(1000 * seconds)
        + rate.format(learning_rate=1e-5)
        + batch.format(batch_size=64)
        + "".join(named.format(name, value) for name, value in losses if value >= 0)  # as upstream: NaN is left out
        + scale.format(scale=1.0, loss_scale=1.0)
        + norm.format(grad_norm=0.5 + step / 100)
        + skips.format(skipped)
        + nans.format(int(math.isnan(loss)))
        + "\n"
    )


def write_log(path, losses=LOSSES, times=TIMES, *, prefix="", extra=""):
    lines = [prefix + log_line(step, loss, times[step], mtp=(loss + 1, loss + 2)) for step, loss in losses.items()]
    path.write_text("building datasets | not: a line\n" + "".join(lines) + extra)
    return path


def write_ours(folder, losses=LOSSES, times=TIMES):
    with open_loggers(LoggerSettings(folder=folder, tensorboard=None), rank=0, run={}) as loggers:
        for step, loss in losses.items():
            values = {
                "loss": loss,
                "mtp_1_loss": loss + 1,
                "mtp_2_loss": loss + 2,
                "step_seconds": times[step],
                "gradient_norm": 0.5 + step / 100,
                "learning_rate": 1e-5,
                "consumed_samples": 64 * step,
            }
            loggers.log(Record(kind="step", step=step, values=values))
        loggers.log(Record(kind="validation", step=20, values={"validation_loss": 1.25}))
    return folder


def names(*given):
    return Names(given)


def test_megatron_lms_source_still_has_the_lines_that_the_log_reader_relies_on():
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import training

    printed = inspect.getsource(training.training_log)
    for piece in PIECES:
        assert piece in printed
    assert 'f"mtp_{i+1} loss"' in inspect.getsource(MTPLossLoggingHelper.track_mtp_metrics)
    validated = inspect.getsource(training.evaluate_and_print_results)
    assert "validation{suffix} loss at {prefix} | " in validated
    # What a log's reader undoes: sums that the first line keeps, times with fractions beside it, rates read after the scheduler's step.
    assert "should_reset = not is_first_iteration" in printed
    assert "if iteration % args.log_interval == 0 or is_first_iteration" in printed
    assert "datetime.now().strftime('%Y-%m-%d %H:%M:%S.%f')" in printed
    assert "if avg >= 0.0" in printed
    trained = inspect.getsource(training.train)
    assert trained.index("train_step(") < trained.index("get_canonical_lr_for_logging")
    assert "opt_param_scheduler.step(" in inspect.getsource(training.train_step)
    assert "{} value: {:.6E} | " in validated


def test_a_megatron_log_is_read_with_any_prefix_of_a_launcher(tmp_path):
    tail = (
        "-" * 80 + "\n validation loss at iteration 20 | lm loss value: 1.250000E+00 | lm loss PPL: 3.490343E+00 | \n"
        " validation loss at iteration 23 on validation set | lm loss value: 1.125000E+00 | lm loss PPL: 3.08E+00 | \n"
        " validation loss at iteration 23 on test set | lm loss value: 9.000000E+00 | lm loss PPL: 8.1E+03 | \n"
    )
    run = read_run(write_log(tmp_path / "job-7.out", prefix="\x1b[32m[default15]:", extra=tail), names())
    assert run.source == "Megatron-LM log"
    assert run.name == "job-7"
    assert run.series["loss"] == pytest.approx(LOSSES, rel=1e-6)
    assert run.series["step_seconds"] == pytest.approx(TIMES)
    assert run.series["mtp_2_loss"][5] == pytest.approx(LOSSES[5] + 2, rel=1e-6)
    assert run.series["gradient_norm"][3] == 0.53
    assert run.series["consumed_samples"][23] == 23 * 64
    assert run.series["learning_rate"] == dict.fromkeys(range(2, 25), 1e-5)
    assert run.series["validation_loss"] == {20: 1.25, 23: 1.125}
    assert run.depths == 2


def test_a_loss_that_megatron_lm_leaves_out_is_no_number(tmp_path):
    run = read_run(write_log(tmp_path / "a.log", LOSSES | {7: math.nan}), names())
    assert [step for step, loss in run.series["loss"].items() if math.isnan(loss)] == [7]


def test_a_restart_in_a_log_replaces_the_repeated_steps(tmp_path):
    text = "".join(log_line(step, 9.0, 50.0) for step in range(1, 13))
    again = "".join(log_line(step, 2.0, 50.0) for step in range(6, 10))
    (tmp_path / "a.log").write_text(text + again)
    run = read_run(tmp_path / "a.log", names())
    assert list(run.series["loss"]) == list(range(1, 10))
    assert run.series["loss"][6] == 2.0
    assert any(remark.startswith("7 steps were run again") for remark in run.remarks)


def test_a_log_of_every_tenth_iteration_and_skipped_ones_says_so(tmp_path):
    lines = [log_line(step, 2.0, 50.0, skipped=step == 20) for step in range(10, 60, 10)]
    (tmp_path / "a.log").write_text("".join(lines))
    remarks = " ".join(read_run(tmp_path / "a.log", names()).remarks)
    assert "one line in 10 iterations" in remarks
    assert "1 iterations were skipped" in remarks


def test_our_lines_are_read_from_the_folder_and_the_file(tmp_path):
    folder = write_ours(tmp_path / "ours")
    for path in (folder, folder / "metrics.jsonl"):
        run = read_run(path, names())
        assert (run.name, run.source) == ("ours", "packproof JSON lines")
        assert run.series["loss"] == LOSSES
        assert run.series["validation_loss"] == {20: 1.25}
    with open_loggers(LoggerSettings(folder=folder, tensorboard=None), rank=0, run={}, finished_steps=4) as loggers:
        loggers.log(Record(kind="step", step=5, values={"loss": math.inf}))
    run = read_run(folder, names())
    assert (list(run.series["loss"]), run.series["loss"][5]) == ([1, 2, 3, 4, 5], math.inf)


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize("tags", [("loss", "step_seconds", "mtp_1_loss"), ("lm loss", "iteration-time", "mtp_1 loss")])
@pytest.mark.parametrize("new_style", [False, True])
def test_event_files_are_read_with_either_systems_names(tmp_path, tags, new_style):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "events"))
    for step, loss in LOSSES.items():
        for tag, value in zip(tags, (loss, TIMES[step], loss + 1), strict=True):
            writer.add_scalar(tag, value, step, new_style=new_style)
    writer.close()
    (file,) = (tmp_path / "events").iterdir()
    for path in (tmp_path / "events", file):
        run = read_run(path, names())
        assert run.name == "events"
        assert run.series["loss"] == {step: as_float32(loss) for step, loss in LOSSES.items()}
        assert run.series["step_seconds"] == TIMES
        assert run.depths == 1


HISTORY = [
    {"_step": 1, "_runtime": 5.5, "train/loss": 2.5, "train/grad_norm": 0.5, "timing/train/total_step_time": 50.0},
    {"_step": 2, "train/loss": 2.25, "train/grad_norm": "NaN"},
    {"_step": 2, "timing/train/total_step_time": 51.0},
    {"_step": 3, "validation/val_loss": 2.125, "train/loss": None},
]


def check_history(run):
    assert run.source.startswith("W&B export")
    assert run.series["loss"] == {1: 2.5, 2: 2.25}
    assert run.series["step_seconds"] == {1: 50.0, 2: 51.0}
    assert run.series["gradient_norm"][1] == 0.5
    assert math.isnan(run.series["gradient_norm"][2])
    assert run.series["validation_loss"] == {3: 2.125}


@pytest.mark.parametrize("form", ["list", "lines", "columns", "pandas", "csv"])
def test_exports_of_wandb_are_read_in_each_form(tmp_path, form):
    columns = list(dict.fromkeys(name for row in HISTORY for name in row))
    path = tmp_path / {"lines": "a.jsonl", "csv": "a.csv"}.get(form, "a.json")
    if form == "list":
        path.write_text(json.dumps(HISTORY))
    elif form == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in HISTORY))
    elif form == "columns":
        path.write_text(json.dumps({name: [row.get(name) for row in HISTORY] for name in columns}))
    elif form == "pandas":
        path.write_text(
            json.dumps({name: {str(at): row.get(name) for at, row in enumerate(HISTORY)} for name in columns})
        )
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["", *columns])
            writer.writeheader()
            writer.writerows({"": at, **row} for at, row in enumerate(HISTORY))
    check_history(read_run(path, names()))


def test_a_chart_of_one_run_is_read_and_of_several_is_refused(tmp_path):
    head = '"Step","run - 1 - train/loss","run - 1 - train/loss__MIN","run - 1 - train/loss__MAX"'
    (tmp_path / "a.csv").write_text(head + '\n"1","2.5","2.5","2.5"\n"2","2.25","2.25","2.25"\n')
    assert read_run(tmp_path / "a.csv", names()).series["loss"] == {1: 2.5, 2: 2.25}
    (tmp_path / "a.csv").write_text('"Step","one - train/loss","two - train/loss"\n"1","2.5","2.5"\n')
    with pytest.raises(InputError, match="several runs, one and two"):
        read_run(tmp_path / "a.csv", names())


def test_names_of_ones_own_go_before_the_known_ones(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,ce,ahead\n1,9.0,2.5,3.0\n")
    run = read_run(tmp_path / "a.csv", names("loss=ce", "mtp_1_loss=ahead"))
    assert run.series["loss"] == {1: 2.5}
    assert run.series["mtp_1_loss"] == {1: 3.0}
    with pytest.raises(InputError, match="the run has ahead, ce, loss, step"):
        read_run(tmp_path / "a.csv", names("loss=mine"))
    with pytest.raises(InputError, match="SERIES=NAME"):
        names("perplexity=ce")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.log", "nothing here\n", "no line of Megatron-LM"),
        ("a.log", " iteration        1/     200 | grad norm: 0.5 |\n", "no loss among grad norm"),
        ("a.csv", "step,accuracy\n1,0.5\n", "no loss among accuracy, step"),
        ("a.csv", "loss\n1.0\n", "no column of steps"),
        ("a.json", "{broken", "neither JSON"),
        ("a.json", "3", "no history of a run"),
        ("a.json", '{"_step": [1, 2], "loss": [1.0]}', "must have one length"),
        ("a.jsonl", '{"kind": "run", "step": 0}\n', "no loss"),
        ("run-1.wandb", "", "export the run's history"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused_with_the_missing_part(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        read_run(tmp_path / name, names())


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "no log\n"), ("a.json", "{broken"), ("a.jsonl", '{"messages": []}\n'), ("a.csv", "x\n1\n")],
)
def test_a_file_of_an_unknown_kind_is_refused_with_the_known_kinds(tmp_path, name, content, capsys):
    (tmp_path / name).write_text(content)
    assert main(["recorded", str(tmp_path / name), str(tmp_path / name)]) == 2
    assert "To fix it: give a Megatron-LM log, a run's folder or its metrics.jsonl" in capsys.readouterr().err


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"neither metrics\.jsonl nor event files"):
        read_run(tmp_path, names())


SEVEN = dict.fromkeys(("loss", "mtp_1_loss", "validation_loss"), Precision(digits=7, decimals=9, words="7 digits"))


def run_of(name, **series):
    return Run(name=name, source="test", place="here", series=series)


def published():
    """Runs with the published means and differences over steps 3 to 20."""
    steps = range(1, 24)
    # Eighteen differences of the published mean and largest.
    rest = (18 * 0.001631 - 0.004211) / 17
    gaps = {step: 0.004211 if step == 11 else rest if 3 <= step <= 20 else 1.0 for step in steps}
    # Spread that leaves the mean as it is, and slow first steps that must not count.
    spread = {step: 0.0 if 3 <= step <= 20 else 100.0 for step in steps} | {4: 0.5, 5: -0.5}
    first = run_of(
        "Megatron-LM",
        loss=dict.fromkeys(steps, 2.0),
        step_seconds={step: 51.9744 + spread[step] for step in steps},
        gradient_norm=dict.fromkeys(steps, 0.5),
    )
    second = run_of(
        "NeMo-RL",
        loss={step: 2.0 + gaps[step] for step in steps},
        step_seconds={step: 52.3428 + 2 * spread[step] for step in steps},
        gradient_norm=dict.fromkeys(steps, 0.625),
    )
    return first, second


def test_the_published_table_comes_out_of_the_published_numbers():
    found = compare(*published(), Window(first=3, last=20))
    assert time_rows(found) == [
        ("Megatron-LM", "51.9744 s", "steps 3-20", "100.00 %"),
        ("NeMo-RL", "52.3428 s", "steps 3-20", "99.30 %"),
        ("NeMo-RL, gap", "+0.3684 s (+0.71 %)", "18 steps", "-0.70 %"),
    ]
    assert (round(found.loss.mean, 6), round(found.loss.largest, 6)) == (0.001631, 0.004211)
    assert (found.loss.largest_at, found.loss.steps, found.loss.all_finite) == (11, 18, True)
    assert found.whole.largest == 1.0
    (norm,) = [each for each in found.differences if each.name == "gradient_norm"]
    assert (norm.mean, norm.largest_relative) == (0.125, 0.25)


def test_equal_runs_are_equal_and_the_first_difference_is_named():
    first = run_of("a", loss=LOSSES)
    assert compare(first, run_of("b", loss=dict(LOSSES)), Window(first=3, last=20)).loss.first_at is None
    other = run_of("b", loss=LOSSES | {2: 5.0, 9: math.nextafter(LOSSES[9], 9)})
    found = compare(first, other, Window(first=3, last=20))
    assert (found.loss.first_at, found.loss.largest_at, found.loss.largest > 0) == (9, 9, True)
    assert found.whole.first_at == 2


def test_the_verdict_looks_for_the_first_difference_in_all_steps_and_says_which():
    def said(second):
        return verdict(compare(run_of("a", loss=LOSSES), run_of("b", loss=LOSSES | second), Window(first=3, last=20)))

    every = "all 23 steps that both runs have (1-23)"
    assert said({}) == f"equal losses, to the last recorded digit, at {every}"
    assert said({22: 5.0}) == (
        f"losses first differ at step 22, of {every}, outside of the window 3-20; "
        "in steps 3-20 all 18 are equal, over all steps they differ by 2.95 at most (step 22)"
    )
    near, far = LOSSES[2] + 1, LOSSES[9] + 0.5
    assert said({2: near, 9: far}) == (
        f"losses first differ at step 2, of {every}, outside of the window 3-20; "
        "in steps 3-20 they differ at 1 of 18, by 0.0278 on average and 0.5 at most (step 9)"
    )


def test_losses_of_depths_and_validations_are_compared_like_the_loss(tmp_path, capsys):
    def said(**series):
        first = run_of("a", loss=LOSSES, mtp_1_loss=LOSSES, validation_loss={20: 1.5})
        second = Run(name="b", source="test", place="here", series={**first.series, **series}, precisions=SEVEN)
        found = compare(first, second, Window(first=3, last=20))
        return found, verdict(found)

    every = "all 23 steps that both runs have (1-23)"
    found, text = said()
    assert (found.equal, text) == (True, f"equal losses (loss, mtp 1 loss), to the last recorded digit, at {every}")
    found, text = said(mtp_1_loss={step: loss + 1 for step, loss in LOSSES.items()})
    assert not found.equal
    assert not found.equal_but_for_rounding
    assert text == (
        "by more than rounding losses differ at 23 steps, first at step 1 (mtp 1 loss) (the sources round losses, b to 7 digits); "
        f"losses first differ at step 1 in mtp 1 loss, of {every}, outside of the window 3-20; mtp 1 loss: in steps 3-20 "
        "differ at 18 of 18, by 1 on average and 1 at most (step 3); equal at all steps: loss"
    )
    assert found.document()["losses_at_all_steps"]["mtp_1_loss"]["differing"] == 23
    assert broken_limits(found, most_loss_difference=0.5, most_time_ratio=None) == [
        "mtp_1_loss differs by 1, more than 0.5"
    ]
    found, text = said(validation_loss={20: 2.0})
    assert not found.equal
    assert "validation losses differ at 1 of 1, first at step 20, by 0.5 at most" in text
    found, text = said(mtp_1_loss=LOSSES | {5: math.nan})
    assert (found.all_finite, text) == (False, "losses that are not numbers: b at step 5 (mtp 1 loss)")
    log = write_log(tmp_path / "a.log")
    apart = tmp_path / "b.log"
    apart.write_text("".join(log_line(step, loss, 50.0, mtp=(loss + 2, loss + 2)) for step, loss in LOSSES.items()))
    assert main(["recorded", str(log), str(apart)]) == 0
    told = capsys.readouterr().out
    assert "first differ at step 1 in mtp 1 loss" in told
    assert "as far as they can tell" not in told


def test_a_step_that_a_series_lacks_is_missing_and_no_broken_number(tmp_path):
    rows = [{"_step": step, "loss": loss, "mtp_1_loss": loss + 1} for step, loss in LOSSES.items()]
    del rows[8]["mtp_1_loss"]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    export = read_run(tmp_path / "a.json", names())
    found = compare(write_and_read(tmp_path / "ours"), export, Window(first=3, last=20))
    (depth,) = [each for each in found.differences if each.name == "mtp_1_loss"]
    assert (depth.steps, depth.all_finite) == (17, True)
    assert "mtp 1 loss is in both runs at 22 of these 23 steps" in verdict(found)


def test_a_depth_that_megatron_lm_leaves_out_is_no_number(tmp_path):
    lines = [log_line(step, loss, 50.0, mtp=(loss + 1,)) for step, loss in LOSSES.items()]
    lines[8] = re.sub(r" mtp_1 loss: \S+ \|", "", lines[8])
    (tmp_path / "a.log").write_text("".join(lines))
    run = read_run(tmp_path / "a.log", names())
    assert [step for step, loss in run.series["mtp_1_loss"].items() if math.isnan(loss)] == [9]


def write_and_read(folder):
    return read_run(write_ours(folder), names())


def test_the_difference_is_drawn_over_the_steps_of_the_losses(monkeypatch):
    drawn = {}
    monkeypatch.setattr(page_module, "draw", lambda lines, *, title, **_: drawn.update({title: lines}) or "")
    part = {step: loss for step, loss in LOSSES.items() if 5 <= step <= 20}
    page_module.pictures(compare(run_of("a", loss=LOSSES), run_of("b", loss=part), Window(first=6, last=20)))
    spans = [
        (min(xs), max(xs))
        for lines in (drawn["loss"], drawn["B / A of the losses"], drawn["absolute difference of the losses"])
        for xs in [[x for line in lines for x, _ in line.points]]
    ]
    assert spans == [(1, 23)] * 3


def test_a_constant_ratio_is_drawn_as_a_level_line(monkeypatch):
    drawn = {}
    monkeypatch.setattr(page_module, "draw", lambda lines, *, title, **_: drawn.update({title: lines}) or "")
    higher = {step: loss * 1.003 for step, loss in LOSSES.items()}
    page_module.pictures(compare(run_of("a", loss=LOSSES), run_of("b", loss=higher), Window(first=6, last=20)))
    equal, ratio = drawn["B / A of the losses"]
    assert {y for _, y in equal.points} == {1.0}
    assert [y for _, y in ratio.points] == pytest.approx([1.003] * 23)


def test_differences_from_rounding_are_distinguished_from_others(tmp_path):
    ours = run_of("ours", loss=LOSSES)
    log = read_run(write_log(tmp_path / "a.log"), names())
    found = compare(ours, log, Window(first=3, last=20))
    assert found.loss.first_at is not None
    assert (found.whole.beyond_rounding_at, found.whole.beyond_rounding) == (None, 0)
    assert verdict(found).startswith(
        "equal losses as far as the sources can tell: no difference is more than rounding (the sources round losses, a to 7 digits); "
    )
    # Half a unit in the seventh digit is 5e-7 here; one digit further is no rounding.
    other = run_of("ours", loss=LOSSES | {7: LOSSES[7] + 2e-6, 21: LOSSES[21] + 2e-6})
    found = compare(other, log, Window(first=3, last=20))
    assert (found.loss.beyond_rounding_at, found.whole.beyond_rounding) == (7, 2)
    assert verdict(found).startswith("by more than rounding losses differ at 2 steps, first at step 7 (")
    single = {step: struct.unpack("f", struct.pack("f", loss))[0] for step, loss in LOSSES.items()}
    board = replace(run_of("board", loss=single), precisions={"loss": FLOAT32})
    assert compare(ours, board, Window(first=3, last=20)).whole.beyond_rounding == 0
    exact = run_of("exact", loss=single)
    assert compare(ours, exact, Window(first=3, last=20)).whole.beyond_rounding > 0


def test_nan_is_counted_and_left_out_of_means():
    found = compare(
        run_of("a", loss=LOSSES | {5: math.nan}),
        run_of("b", loss=LOSSES | {5: math.nan, 6: math.inf, 7: LOSSES[7] + 1}),
        Window(first=3, last=20),
    )
    assert found.loss.not_finite == ((5,), (5, 6))
    assert not found.loss.all_finite
    assert found.loss.mean == pytest.approx(1 / 16)
    json.dumps(found.document(), allow_nan=False)


def test_steps_are_aligned_by_number_and_missing_ones_are_reported():
    sparse = {step: loss for step, loss in LOSSES.items() if step != 4}
    found = compare(run_of("a", loss=LOSSES), run_of("b", loss=sparse), Window(first=3, last=20))
    assert (found.loss.steps, found.loss.first_at) == (17, None)
    assert "1 of the 18 steps of the window are not in both runs" in found.remarks
    zero_based = run_of("b", loss={step - 1: loss for step, loss in LOSSES.items()})
    assert compare(run_of("a", loss=LOSSES), zero_based, Window(first=3, last=20)).loss.first_at == 3
    moved = shifted(zero_based, 1)
    assert compare(run_of("a", loss=LOSSES), moved, Window(first=3, last=20)).loss.first_at is None


def test_runs_with_different_work_are_reported():
    first = run_of("a", loss=LOSSES, consumed_samples={step: 64 * step for step in LOSSES}, learning_rate={3: 1e-5})
    second = run_of("b", loss=LOSSES, consumed_samples={step: 32 * step for step in LOSSES}, learning_rate={3: 2e-5})
    remarks = " | ".join(compare(first, second, Window(first=3, last=20)).remarks)
    assert "rows so far from step 1" in remarks
    assert "learning rates from step 3" in remarks
    assert "a has no step times" in remarks


def test_runs_without_a_common_step_are_refused_with_their_steps():
    with pytest.raises(InputError, match=r"a has steps 1 to 23 and b has steps 50 to 50"):
        compare(run_of("a", loss=LOSSES), run_of("b", loss={50: 1.0}), Window(first=3, last=20))


@pytest.mark.parametrize("text", ["", "a-b", "9-3", "3-", "3..20"])
def test_a_window_of_another_form_is_refused(text):
    with pytest.raises(InputError, match="--steps"):
        Window.parse(text)


# Of printed tables of Student's t, one-sided 95 %.
@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 6.3138), (2, 2.9200), (4, 2.1318), (17, 1.7396), (30, 1.6973), (199, 1.6525)]
)
def test_students_quantile_is_that_of_the_tables(freedom, value):
    assert student_quantile(0.95, freedom) == pytest.approx(value, abs=5e-5)


def test_the_bound_of_the_ratio_is_paired():
    # Steps of very different length, the second system always 1 to 3 % slower: unpaired, nothing could be said.
    before = [10.0, 50.0, 20.0, 80.0]
    found = paired_ratio(before, [time * ratio for time, ratio in zip(before, (1.01, 1.03, 1.01, 1.03), strict=True)])
    logs = [math.log(1.01), math.log(1.03)] * 2
    mean = sum(logs) / 4
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / 3)
    reach = 2.353363 * deviation / 2
    assert found.ratio == pytest.approx(math.exp(mean))
    assert (found.lower, found.upper) == pytest.approx((math.exp(mean - reach), math.exp(mean + reach)), rel=1e-6)
    assert 1 < found.lower < 1.02 < found.upper < 1.04
    assert paired_ratio([1.0], [2.0]) is None


def test_a_broken_limit_is_reported():
    found = compare(*published(), Window(first=3, last=20))
    assert broken_limits(found, most_loss_difference=0.005, most_time_ratio=1.02) == []
    broken = broken_limits(found, most_loss_difference=0.004, most_time_ratio=1.001)
    assert len(broken) == 2
    assert "0.00421" in broken[0]
    untimed = compare(run_of("a", loss=LOSSES), run_of("b", loss=LOSSES), Window(first=3, last=20))
    assert "cannot be bounded" in broken_limits(untimed, most_loss_difference=None, most_time_ratio=1.02)[0]
    hopeless = compare(run_of("a", loss={3: math.nan}), run_of("b", loss={3: 1.0}), Window(first=3, last=3))
    assert broken_limits(hopeless, most_loss_difference=1.0, most_time_ratio=None)


def test_the_command_compares_a_log_with_our_run(tmp_path, capsys):
    log = write_log(tmp_path / "megatron.log")
    ours = write_ours(tmp_path / "ours", times={step: time * 1.01 for step, time in TIMES.items()})
    files = ["--html", str(tmp_path / "new" / "page.html"), "--json", str(tmp_path / "all.json")]
    assert main([str(log), str(ours), "--steps", "3-20", "--name-a", "Megatron-LM", *files]) == 0
    text = capsys.readouterr().out
    assert "99.01 %" in text
    assert "mtp 2 loss" in text
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["differences"]["loss"]["largest"] < 1e-6
    assert document["step_seconds"]["paired"]["ratio"] == pytest.approx(1.01)
    assert document["runs"][0]["name"] == "Megatron-LM"
    page = (tmp_path / "new" / "page.html").read_text()
    assert page.count("<svg") == 14  # seven pictures, each for a wide and for a narrow screen
    assert "99.01 %" in page
    assert not re.search(r'(src|href)="', page)
    assert "<script" not in page


def test_a_name_from_a_file_cannot_write_into_the_page(tmp_path):
    first, second = published()
    bad = Run(name="<i>&", source="x", place='"><script>', series=second.series)
    page_module.write_page(compare(first, bad, Window(first=3, last=20)), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "<i>" not in page
    assert "&lt;i&gt;&amp;" in page


def test_exit_statuses_are_0_compared_1_limit_broken_2_cannot_run(tmp_path, capsys):
    log = str(write_log(tmp_path / "a.log"))
    assert main(["recorded", log, log]) == 0
    assert "a (A)" in capsys.readouterr().out
    for folder in ("mine", "theirs"):
        (tmp_path / folder / "logs").mkdir(parents=True)
        write_log(tmp_path / folder / "logs" / "a.log")
    assert main(["recorded", *(str(tmp_path / folder / "logs" / "a.log") for folder in ("mine", "theirs"))]) == 0
    printed = capsys.readouterr().out
    assert "mine" in printed
    assert "a (A)" not in printed
    broken = str(write_log(tmp_path / "b.log", LOSSES | {7: math.nan}))
    assert main(["recorded", log, broken]) == 1
    assert "b at step 7" in capsys.readouterr().out
    far = str(write_log(tmp_path / "c.log", {step: loss + 0.5 for step, loss in LOSSES.items()}))
    assert main([log, far, "--most-loss-difference", "0.1"]) == 1
    assert main([log, str(tmp_path / "missing.log")]) == 2
    assert main([log, log, "--steps", "900-901"]) == 2
    assert main([log, log, "--html", str(tmp_path / "a.log" / "page.html")]) == 2
    assert main([]) == 2
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert (
        f"{tmp_path / 'missing.log'}: there is no such file or folder. To fix it: give a Megatron-LM log, a run's"
        in captured.err
    )
    assert f"--html {tmp_path / 'a.log' / 'page.html'}: it cannot be written" in captured.err
    assert "Errno" not in captured.err
    assert "commands: recorded" in captured.out
    with pytest.raises(SystemExit) as stopped:
        main([log])
    assert stopped.value.code == 2


def test_the_screen_shows_every_number_on_a_narrow_terminal():
    from tools.compare_runs.terminal import show

    first, second = published()
    long = replace(second, name="a-run-of-a-long-name.with.metrics")
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    show(compare(first, long, Window(first=3, last=20)), console, broken=["one"])
    text = console.export_text()
    assert max(len(line) for line in text.splitlines() if line.startswith(("│", "┃"))) <= 80
    assert "does not hold: one" in text
    assert "…" not in text
    for number in (
        "51.9744 s",
        "+0.3684 s (+0.71 %)",
        "99.30 %",
        "0.001631",
        "0.004211",
        "0.211 %",
        "0.125000",
        "25 %",
    ):
        assert f" {number} │" in text
