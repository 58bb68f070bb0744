"""Logs of Megatron-LM's own driver beside packproof's records of the same training: equal, and not where a log is doctored."""

import csv
import json
import re
from pathlib import Path

import pytest

from equivalence.errors import InputError
from tools.compare_runs.__main__ import main
from tools.compare_runs.comparison import Window, compare
from tools.compare_runs.readers import Names, read_run
from tools.compare_runs.run import Run, seen
from tools.compare_runs.words import verdict

RECORDED = Path(__file__).parent / "data" / "recorded"
PAIRS = sorted(path.stem for path in RECORDED.glob("*.log"))
WINDOW = Window(first=1, last=20)


def read(path):
    return read_run(path, Names())


def ours(name):
    return read(RECORDED / f"{name}.metrics.jsonl")


def doctored(tmp_path, name, change):
    """The pair's log after a change of its text, which must have changed something, against packproof's records."""
    text = (RECORDED / f"{name}.log").read_text()
    changed = change(text)
    assert changed != text
    (tmp_path / "a.log").write_text(changed)
    return compare(read(tmp_path / "a.log"), ours(name), WINDOW)


def lines_of(text):
    return [line for line in text.splitlines(keepends=True) if " iteration " in line]


def remarks(found):
    return " | ".join(found.remarks)


def test_every_recorded_pair_exists():
    assert PAIRS == [
        "cp2-mtp", "dp2-ep2-moe-dist", "one", "one-gb1-seq256-steps12", "one-li4", "one-mtp", "one-val-wsd-wdcos",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("order", [1, -1], ids=["log-first", "log-second"])
def test_a_recorded_pair_is_equal(name, order):
    found = compare(*[read(RECORDED / f"{name}.log"), ours(name)][::order], WINDOW)
    assert found.equal_but_for_rounding
    assert found.all_finite
    assert "the same work" not in remarks(found)
    assert all(each.beyond_rounding_at is None for each in found.differences)
    assert verdict(found).startswith("equal losses as far as the sources can tell")


def test_the_command_calls_a_pair_equal_and_ends_with_0(capsys):
    name = RECORDED / "one-gb1-seq256-steps12"
    assert main([f"{name}.log", f"{name}.metrics.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "equal losses as far as the sources can tell" in told
    assert "both runs trained nothing at 2 steps, first at step 3" in " ".join(told.split())


# Learning rates


def test_a_learning_rate_of_the_wrong_step_is_a_difference(tmp_path):
    def one_earlier(text):
        rates = re.findall(r"learning rate: (\S+)", text)
        written = iter(["0.000000E+00", *rates[:-1]])
        return re.sub(r"learning rate: \S+", lambda _: f"learning rate: {next(written)}", text)

    assert "learning rates from step 2 on" in remarks(doctored(tmp_path, "one", one_earlier))


def test_one_changed_learning_rate_is_a_difference(tmp_path):
    found = doctored(tmp_path, "one", lambda text: text.replace("1.500000E-03", "1.500010E-03"))
    assert "learning rates from step 4 on" in remarks(found)


# The first line is in the sums of the second


def scaled(text, step, factor, name="lm loss"):
    """The text with one number of one iteration multiplied."""

    def changed(match):
        return f"{match[1]}{float(match[2]) * factor:.6E} |"

    return re.sub(rf"(iteration +{step}/.*? {name}: )(\S+) \|", changed, text)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_another_loss_at_a_first_line_is_found(tmp_path, step):
    found = doctored(tmp_path, "one-mtp", lambda text: scaled(text, step, 1 + 2e-6))
    assert found.whole.beyond_rounding_at == step
    assert not found.equal_but_for_rounding


def test_a_second_line_that_stands_alone_is_another_number_there(tmp_path):
    found = doctored(tmp_path, "one", lambda text: text.replace("8.324863E+00", "8.322736E+00"))
    assert found.whole.beyond_rounding_at == 2


def test_a_depth_of_the_second_line_is_undone_too(tmp_path):
    found = doctored(tmp_path, "one-mtp", lambda text: scaled(text, 2, 1 + 2e-6, "mtp_2 loss"))
    assert [each.beyond_rounding_at for each in found.wholes] == [None, None, 2]


def restarted(text, step):
    """The log of a run that was stopped after `step - 1` and started again: its second line holds the first again."""
    lines = lines_of(text)
    losses = {
        record["step"]: record["loss"]
        for record in map(json.loads, (RECORDED / "one.metrics.jsonl").read_text().splitlines())
        if record["kind"] == "step"
    }
    both = (losses[step] + losses[step + 1]) / 2
    lines[step] = re.sub(r"lm loss: \S+", f"lm loss: {both:.6E}", lines[step])
    head = text.split(lines_of(text)[0])[0]
    return head + "".join(lines[: step - 1]) + head + "".join(lines[step - 1 :])


def test_the_second_line_after_a_restart_is_undone_too(tmp_path):
    found = doctored(tmp_path, "one", lambda text: restarted(text, 3))
    assert found.equal_but_for_rounding
    assert found.whole.steps == 5
    found = doctored(tmp_path, "one", lambda text: scaled(restarted(text, 3), 4, 1 + 2e-6))
    assert found.whole.beyond_rounding_at == 4


def test_a_driver_before_0_16_prints_each_iteration_alone(tmp_path):
    def older(text):
        return re.sub(r"(:\d\d)\.\d+\]", r"\1]", text).replace("8.324863E+00", "8.322736E+00")

    assert doctored(tmp_path, "one", older).equal_but_for_rounding


def test_a_second_line_whose_first_is_lost_is_left_out_and_reported(tmp_path):
    found = doctored(tmp_path, "one", lambda text: text.replace("8.326990E+00 |", "8.326[rank1] hello 990E+00 |"))
    assert found.equal_but_for_rounding
    assert found.whole.steps == 3
    assert "are left out: iteration 1 |" in remarks(found)
    assert "cannot be told, and they are left out: iteration 2" in remarks(found)


def test_an_iteration_that_the_optimizer_skipped_is_in_no_mean(tmp_path):
    def skipped(text):
        lines = lines_of(text)
        lines[0] = re.sub(r" lm loss: \S+ \|", "", lines[0]).replace(
            "skipped iterations:   0", "skipped iterations:   1"
        )
        lines[1] = (
            lines[1]
            .replace("8.324863E+00", "8.322736E+00")
            .replace("skipped iterations:   0", "skipped iterations:   1")
        )
        return "".join(lines)

    found = doctored(tmp_path, "one", skipped)
    assert (found.whole.steps, found.equal_but_for_rounding, found.all_finite) == (4, True, True)
    assert "a: 1 iterations were skipped by the optimizer" in found.remarks


# Intervals


@pytest.mark.parametrize(("step", "factor"), [(1, 1 + 1e-6), (4, 1 + 2e-6), (8, 1 - 2e-6)])
def test_another_mean_over_an_interval_is_found(tmp_path, step, factor):
    assert doctored(tmp_path, "one-li4", lambda text: scaled(text, step, factor)).whole.beyond_rounding_at == step


def test_times_of_an_interval_are_compared_with_the_mean_of_the_same_steps():
    found = compare(read(RECORDED / "one-li4.log"), ours("one-li4"), Window(first=2, last=8))
    records = ours("one-li4").series["step_seconds"]
    assert found.times.mean[0] == pytest.approx(((4 * 1.9788 - 1.7955) + 4 * 3.1938) / 7)
    assert found.times.mean[1] == pytest.approx(sum(records[step] for step in range(2, 9)) / 7)
    assert found.times.steps == 7


def test_intervals_of_two_logs_meet_where_they_end_together():
    losses = {step: 2.0 + 1 / step for step in range(1, 41)}
    first = Run(
        name="a", source="test", place="here",
        series={"loss": {10 * n: sum(losses[10 * n - k] for k in range(10)) / 10 for n in range(1, 5)}},
        widths=dict.fromkeys(range(10, 50, 10), 10),
    )  # fmt: skip
    second = Run(
        name="b", source="test", place="here",
        series={"loss": {4 * n: sum(losses[4 * n - k] for k in range(4)) / 4 for n in range(1, 11)}},
        widths=dict.fromkeys(range(4, 44, 4), 4),
    )  # fmt: skip
    found = compare(first, second, Window(first=1, last=40))
    assert found.whole.steps == 2
    assert found.whole.largest < 1e-12


# Nothing trained, no number


def test_a_loss_is_a_difference_if_the_other_run_trained_nothing(tmp_path):
    found = doctored(
        tmp_path,
        "one-gb1-seq256-steps12",
        lambda text: text.replace(
            "batch size:     1 | loss scale", "batch size:     1 | lm loss: 1.000000E-06 | loss scale"
        ),
    )
    assert (found.trained_by_one, found.equal_but_for_rounding) == ([3, 6], False)
    assert verdict(found).startswith("only one of the two trained, and has a loss, at steps 3, 6; ")


def test_a_loss_left_out_where_the_gradient_is_not_0_is_no_number(tmp_path, capsys):
    text = (RECORDED / "one.log").read_text()
    (tmp_path / "a.log").write_text(re.sub(r" lm loss: 8.240642E\+00 \|", "", text))
    assert main([str(tmp_path / "a.log"), str(RECORDED / "one.metrics.jsonl")]) == 1
    assert "losses that are not numbers: a at step 4" in capsys.readouterr().out


def test_a_record_without_a_loss_at_a_masked_step_says_the_same(tmp_path):
    records = [json.loads(line) for line in (RECORDED / "one-gb1-seq256-steps12.metrics.jsonl").open()]
    for record in records:
        if record.get("all_masked"):
            del record["loss"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = compare(read(RECORDED / "one-gb1-seq256-steps12.log"), read(tmp_path / "b.jsonl"), WINDOW)
    assert found.equal_but_for_rounding


# Validation


def test_validations_of_the_two_systems_are_named_as_other_numbers():
    found = compare(read(RECORDED / "one-val-wsd-wdcos.log"), ours("one-val-wsd-wdcos"), WINDOW)
    assert found.validation is None
    assert (
        "validation losses are other numbers, and not compared: one-val-wsd-wdcos's are means of microbatch"
        in remarks(found)
    )


def test_validations_of_two_logs_are_compared_with_each_other(tmp_path):
    text = (RECORDED / "one-val-wsd-wdcos.log").read_text()
    (tmp_path / "b.log").write_text(text.replace("7.730254E+00", "7.730264E+00"))
    found = compare(read(RECORDED / "one-val-wsd-wdcos.log"), read(tmp_path / "b.log"), WINDOW)
    assert (found.validation.steps, found.validation.beyond_rounding_at) == (2, 8)
    assert not found.equal_but_for_rounding


# Lines that are not whole, logs of several processes


@pytest.mark.parametrize("cut", [3, 30, 60, 110, 150, 200, 260])
def test_a_last_line_that_was_cut_is_no_line(tmp_path, cut):
    found = doctored(tmp_path, "one-mtp", lambda text: text[: text.rindex(" [2026")] + lines_of(text)[-1][:cut])
    assert (found.whole.steps, found.equal_but_for_rounding, found.all_finite) == (7, True, True)


def test_a_last_line_without_its_newline_is_whole(tmp_path):
    assert doctored(tmp_path, "one", lambda text: text.rstrip("\n")).whole.steps == 5


@pytest.mark.parametrize("at", range(0, 190, 7))
@pytest.mark.parametrize("print_", ["[rank1]: a warning\n", "[rank1]: lm loss: 9.9 | ", "7 steps: 3 |\n"])
def test_a_print_inside_a_line_spoils_that_line_alone(tmp_path, at, print_):
    def printed(text):
        line = lines_of(text)[3]
        start = line.index("| consumed") + 1 + at
        return text.replace(line, line[:start] + print_ + line[start:])

    found = doctored(tmp_path, "one", printed)
    assert found.whole.steps in (4, 5)
    assert found.equal_but_for_rounding
    assert found.all_finite
    assert "the same work" not in remarks(found)


def several(text, change=lambda line: line):
    return "".join(
        f"[rank0]:{line}[rank1]:{change(line)}" if " iteration " in line else line
        for line in text.splitlines(keepends=True)
    )


def test_several_processes_with_equal_numbers_are_reported(tmp_path):
    found = doctored(tmp_path, "one", several)
    assert found.equal_but_for_rounding
    assert "several processes printed into this log, 5 lines twice" in remarks(found)


def test_several_processes_with_different_numbers_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"several processes.*of iteration 1, lm loss is 8\.326990E\+00 .* and 8\.926990E"
    ):
        doctored(tmp_path, "one", lambda text: several(text, lambda line: line.replace("8.32", "8.92")))


def test_several_processes_without_times_are_refused(tmp_path):
    def without_times(text):
        return re.sub(r" \[2026\S+ \S+\]", "", several(text, lambda line: line.replace("loss: 8.", "loss: 9.")))

    with pytest.raises(InputError, match="several processes"):
        doctored(tmp_path, "one-mtp", without_times)


# Digits


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (["8.333240E+00", "1.050000E-03"], "7 digits"),
        (["0.445", "12.132"], "3 decimals"),
        (["8.3332", "8.4001"], "5 digits"),
        (["8.333239555358887", "2.5"], None),
        (["4", "12"], None),
        (["8.3332396", "8.5"], "float32"),
        (["NaN", ""], None),
    ],
)
def test_the_printed_digits_give_the_precision(numbers, words):
    found = seen(numbers)
    assert (None if found is None else found.words) == words


@pytest.mark.parametrize("form", ["%.4f", "%.5g", "%.3E"])
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_an_export_of_few_digits_is_equal_as_far_as_they_go(tmp_path, form, kind):
    series = ours("one-mtp").series["loss"]
    rows = [{"step": step, "loss": form % loss} for step, loss in series.items()]
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", "loss"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("[" + ",".join(f'{{"step": {row["step"]}, "loss": {row["loss"]}}}' for row in rows) + "]")
    assert compare(read(path), ours("one-mtp"), WINDOW).equal_but_for_rounding
    path.write_text(path.read_text().replace(rows[4]["loss"], form % (series[5] + 0.01)))
    assert compare(read(path), ours("one-mtp"), WINDOW).whole.beyond_rounding_at == 5


def test_a_row_of_a_csv_that_was_cut_is_no_row(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,grad_norm\n1,2.5,0.5\n2,2.2")
    assert read(tmp_path / "a.csv").series["loss"] == {1: 2.5}
    (tmp_path / "a.jsonl").write_text('{"_step": 1, "loss": 2.5}\n{"_step": 2, "lo')
    assert read(tmp_path / "a.jsonl").series["loss"] == {1: 2.5}


def test_event_files_of_megatron_lm_have_the_rate_of_the_next_step_and_norms_in_float32(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    mine = ours("one-gb1-seq256-steps12")
    writer = SummaryWriter(str(tmp_path / "events"))
    for step, norm in mine.series["gradient_norm"].items():
        writer.add_scalar("lm loss", mine.series["loss"].get(step, float("nan")), step)
        writer.add_scalar("grad-norm", norm, step)
        writer.add_scalar("learning-rate", mine.series["learning_rate"].get(step + 1, 2e-4), step)
    writer.close()
    found = compare(read(tmp_path / "events"), mine, WINDOW)
    (norms,) = [each for each in found.differences if each.name == "gradient_norm"]
    assert norms.differing
    assert norms.beyond_rounding == 0
    assert found.equal
    assert "the same work" not in remarks(found)


def test_another_gradient_norm_is_reported(tmp_path):
    found = doctored(tmp_path, "one", lambda text: text.replace("grad norm: 1.089", "grad norm: 1.091"))
    assert verdict(found).endswith("gradient norms differ by more than rounding at 1 of 5 steps, first at step 3")


# Names


def test_a_name_can_be_given_for_one_side(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,ce\n1,9.0,2.5\n2,9.0,2.25\n")
    (tmp_path / "b.csv").write_text("step,loss\n1,2.5\n2,2.25\n")
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--steps", "1-2", "--json", str(tmp_path / "all.json")]
    assert main([*files, "--names", "A:loss=ce"]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["equal"]
    assert main([*files, "--names", "loss=ce"]) == 2
    assert main([*files, "--names", "C:loss=ce"]) == 2


# A constant ratio


def with_losses_scaled(tmp_path, factor_of):
    """The records of `one`, each loss multiplied by what `factor_of` says of its step, against those as they are."""
    lines = []
    for line in (RECORDED / "one.metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            record["loss"] *= factor_of(record["step"])
        lines.append(json.dumps(record))
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    return compare(ours("one"), read(tmp_path / "b.jsonl"), WINDOW)


def test_a_constant_ratio_of_losses_is_reported(tmp_path):
    assert "a constant ratio: B's loss is 1.003 times A's" in verdict(with_losses_scaled(tmp_path, lambda _: 1.003))
    assert "constant ratio" not in verdict(with_losses_scaled(tmp_path, lambda step: 1.003 + 0.001 * (step % 2)))
    assert "constant ratio" not in verdict(compare(ours("one"), ours("one"), WINDOW))
