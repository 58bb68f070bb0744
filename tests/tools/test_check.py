"""`packproof check`: a job's own file, tokenizer and configuration, in one verdict and one certificate."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from production.training.__main__ import main as train
from production.training.certificate import check_certificate
from production.training.config import SetupRefused, load
from production.training.data.tokenizer import load_tokenizer
from tools.check.__main__ import main
from tools.check.result import PARTS, PartResult, verdict_of
from tools.diff_row.__main__ import main as diff_row

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples" / "tokenizers" / "nemotron-mini"
LINES = (ROOT / "examples" / "packed" / "sample.jsonl.packed").read_text().split("\n")[:8]
"""Rows of the sample: row 5 is cut, row 3 begins without a system message."""
TWO_SIDES = ("--subjects", "reference,production")
"""Megatron-LM takes seconds to import, and a few tests ask it."""
SYSTEM = {"role": "system", "content": ""}


def row(*contents):
    """A row of one conversation."""
    roles = ("user", "assistant")
    return json.dumps(
        {"messages": [SYSTEM, *({"role": roles[at % 2], "content": text} for at, text in enumerate(contents))]},
        ensure_ascii=False,
    )


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes a job of these lines, and gives what `check` takes; the working folder is the job's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")

    def write(lines=LINES, *, ends="\n", **changes):
        with (tmp_path / "rows.jsonl").open("w", newline="") as file:
            file.write("".join(line + ends for line in lines))
        text = f"""\
defaults: {ROOT}/examples/jobs/small-cpu.yaml
policy:
  tokenizer: {{name: tokenizer}}
  train_global_batch_size: 2
data:
  train: {{dataset_name: megatron_sft_packed, data_path: rows.jsonl}}
  validation: {{dataset_name: megatron_sft_packed, data_path: rows.jsonl}}
"""
        (tmp_path / "job.yaml").write_text(text)
        return ["job.yaml", *(f"{key}={value}" for key, value in changes.items())]

    return write


@pytest.fixture
def check(capsys, monkeypatch):
    """Runs the command; gives its exit status, what it printed and its certificate."""

    def run(words, *options):
        monkeypatch.setenv("COLUMNS", "400")
        status = main([*words, "--out", "out", *options])
        printed = capsys.readouterr()
        path = Path("out/check.json")
        return status, printed.out + printed.err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_parts_that_were_left_out_are_listed_as_not_shown_and_prove_nothing(job, check):
    status, printed, made = check(job(), "--only", "config,file,rows,order", *TWO_SIDES)
    assert (status, made["verdict"]) == (0, "partial")
    assert "layout: left out" in made["not_shown"]
    assert {name: part["status"] for name, part in made["parts"].items()} == dict.fromkeys(
        ("config", "file", "rows", "order"), "equal"
    )
    assert made["parts"]["rows"]["compared"] == made["parts"]["file"]["compared"] == len(LINES)
    assert "1 conversation is cut" in printed, "a loss that the preset allows is told"


def test_the_page_is_one_file_without_a_network(job, check):
    check(job(), "--only", "config,file", *TWO_SIDES)
    page = Path("out/check.html").read_text()
    assert "<script" not in page
    assert page.count("http") == page.count('xmlns="http://www.w3.org/2000/svg"')
    assert "data.certificate: check.json" in page
    assert page.count("<svg") == 6  # three plots, wide and narrow


@pytest.mark.parametrize("fault", ["shift_twice", "ignored_labels_train"])
def test_a_wrong_side_ends_with_1_and_a_command_that_shows_the_row(job, check, fault):
    wrong = f"reference,equivalence.mutants.subjects:{fault}"
    status, printed, made = check(job(), "--only", "rows", "--subjects", wrong)
    assert (status, made["verdict"]) == (1, "differs")
    finding = made["parts"]["rows"]["findings"][0]
    assert "rows.jsonl, line" in finding["where"]
    assert finding["command"] in printed
    words = finding["command"].split()[3:]
    assert diff_row(words) == 1, "the command shows the difference"


def test_a_row_that_trains_nothing_though_nothing_is_cut_is_a_loss_that_no_key_allows(job, check):
    status, printed, made = check(job([*LINES, row("a question that nobody answers")]), "--only", "file")
    assert (status, made["parts"]["file"]["status"]) == (1, "loses")
    assert f"rows.jsonl, line {len(LINES) + 1}" in printed
    assert "no token" in printed


def test_a_row_that_trains_nothing_since_it_is_cut_is_a_loss_that_the_preset_allows(job, check):
    status, printed, made = check(job([row("word " * 3000, "an answer behind the cut")]), "--only", "file")
    assert (status, made["parts"]["file"]["status"]) == (0, "equal")
    assert "1 conversation is cut" in printed


def test_a_loss_is_refused_where_the_configuration_does_not_allow_it(job, check):
    strict = {"data.default.semantics": '"megatron-lm-0.19,lost_conversations=refuse"'}
    status, printed, _ = check(job(**strict), "--only", "file")
    assert status == 1
    assert "line 6" in printed
    assert "truncated" in printed


def test_a_loss_is_reported_with_the_override_that_refuses_it(job, check):
    words = job(**{"data.train.semantics": "strict,lost_conversations=allow"})
    for said in ([], words[1:]):
        _, printed, _ = check(["job.yaml", *said], "--only", "file")
        override = re.search(r"with (data\S+(?: data\S+)*) the check fails on it", printed)
        assert override, printed
        status, printed, _ = check(["job.yaml", *said, *override[1].split()], "--only", "file")
        assert (status, "truncated" in printed) == (1, True), printed


def test_faults_that_stop_a_run_are_not_called_losses(job, check):
    status, _, made = check(job([row("say nothing", "")]), "--only", "file")
    assert (status, made["parts"]["file"]["status"]) == (1, "stops")
    assert ">stops<" in Path("out/check.html").read_text()


def test_a_truncated_last_line_is_counted_once(job, check):
    words = job()
    with Path("rows.jsonl").open("a") as file:
        file.write(row("one", "two")[:-9])
    status, printed, made = check(words, "--only", "config,file")
    assert (status, made["parts"]["file"]["status"]) == (2, "stops")
    assert "(1 fault)" in printed
    assert made["parts"]["file"]["findings"] == []
    turns = [SYSTEM, {"role": "user", "content": None}]
    job([*LINES[:2], json.dumps({"messages": turns})])
    _, printed, _ = check(words, "--only", "config,file")
    assert "(1 fault)" in printed, "a line that both parts name is one fault, too"
    assert any("rows.jsonl, line 9" in note and "counted once" in note for note in made["parts"]["file"]["notes"])


def test_notes_name_the_first_lines(job, check):
    separated = row("one\u2028two", "three")
    plain = row("one", "two")
    _, printed, _ = check(job([plain, separated, plain, separated]), "--only", "file")
    assert "rows.jsonl, lines 2 and 4: 2 lines hold U+2028" in printed
    _, printed, _ = check(job([plain, *LINES[:3]]), "--only", "file")
    assert re.search(r"1 message renders to nothing in this format, first in rows.jsonl, line [2-4] \(row", printed)
    _, printed, _ = check(job([separated] * 5), "--only", "file")
    assert "rows.jsonl, the first: lines 1, 2 and 3: 5 lines hold U+2028" in printed


def test_one_is_not_several(job, check):
    _, printed, _ = check(job([row("one", "two")]), "--only", "file,order")
    page = Path("out/check.html").read_text()
    assert not re.search(r"\b1 (ranks|rows|labels|conversations|messages|tokens|lines)\b", printed + page)
    assert '<b>1</b><span class="dim">conversation</span>' in page
    assert "1 of 1 row." in page


HOSTILE = {
    "another tokenizer": (row("<|im_start|>hello<|im_end|>", "hi"), 0, "<|im_start|> stands in 1 line and is"),
    "U+2028": (row("one\u2028two", "three"), 0, "U+2028"),
    "CRLF": (row("one", "two") + "\r", 0, "CRLF"),
    "tool calls": (
        json.dumps(
            {
                "messages": [
                    SYSTEM,
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": None, "tool_calls": []},
                ]
            }
        ),
        2,
        "content is null",
    ),
    "an empty assistant": (row("say nothing", ""), 1, "empty_assistant"),
    "a truncated line": (row("one", "two")[:-9], 2, "the file ends within this row"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_faults_of_another_packer_are_found_with_line_and_fix(job, check, kind):
    line, expected, text = HOSTILE[kind]
    words = job([row("good", "row"), row("another", "one")])
    with Path("rows.jsonl").open("a", newline="") as file:
        file.write(line + ("" if kind == "a truncated line" else "\n"))
    status, printed, _ = check(words, "--only", "config,file", *TWO_SIDES)
    assert status == expected
    told = [each for each in printed.splitlines() if text in each]
    assert told, printed
    assert "rows.jsonl, line 3" in told[-1]


def test_a_file_packed_for_another_tokenizer_is_noted(job, check):
    status, printed, _ = check(job(LINES * 3, **{"policy.max_total_sequence_length": "1024"}), "--only", "file")
    assert status == 1, "most of its rows are overfull"
    assert "overfull, as if packed for another tokenizer" in printed


def test_a_few_overfull_rows_are_not_noted_as_packed_for_something_else(job, check):
    status, printed, _ = check(job(LINES, **{"policy.max_total_sequence_length": "1024"}), "--only", "file")
    assert status == 0
    assert "as if packed for another tokenizer" not in printed
    assert "are cut" in printed


def test_an_online_job_is_refused_with_a_reason(job, check):
    words = job()
    chat = ROOT / "examples" / "chat" / "sample.jsonl"
    online = [
        "data.train.dataset_name=openai_format",
        f"data.train.data_path={chat}",
        "policy.sequence_packing.enabled=true",
    ]
    status, printed, made = check([*words, *online, "data.validation=null"], "--only", "config")
    assert (status, made["verdict"]) == (2, "refused")
    assert "online path" in printed


def test_a_job_that_cannot_be_read_is_bad_input(job, check):
    status, printed, _ = check([*job(), "policy.precison=float32"])
    assert status == 2
    assert "precision" in printed


def test_a_missing_tokenizer_and_a_wrong_size_are_reported_together(job, check):
    words = job(**{"policy.tokenizer.name": "nowhere", "policy.megatron_cfg.context_parallel_size": "3"})
    status, printed, made = check(words)
    assert status == 2
    assert "nowhere" in printed
    assert made["parts"]["config"]["findings"]
    assert len(made["parts"]["config"]["findings"]) > 1


def change_a_byte(path):
    data = bytearray(path.read_bytes())
    at = data.index(b'"content": "', 200) + 14
    data[at] = ord("x") if data[at] != ord("x") else ord("y")
    path.write_bytes(data)


def change_tokenizer():
    path = Path("tokenizer/tokenizer_config.json")
    read = json.loads(path.read_text())
    path.write_text(json.dumps(read | {"chat_template": "{{ 'another' }}"}))
    template = Path("tokenizer/chat_template.jinja")
    template.write_text(template.read_text() + "{# another #}another")


CHANGES = {
    "file": (lambda: change_a_byte(Path("rows.jsonl")), [], "rows.jsonl"),
    "tokenizer": (change_tokenizer, [], "tokenizer"),
    "configuration": (lambda: None, ["policy.train_global_batch_size=4"], "policy.train_global_batch_size"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_byte_fails_verify_and_the_start_of_the_job(job, check, kind, capsys):
    words = job()
    assert check(words, "--only", "config,file")[0] == 0
    assert main(["--verify", "out/check.json"]) == 0
    held = [*words[1:], "data.certificate=out/check.json"]
    check_certificate(load("job.yaml", held), load_tokenizer(load("job.yaml", held)), 1)
    change, overrides, named = CHANGES[kind]
    change()
    assert main(["job.yaml", *overrides, "--verify", "out/check.json"]) == 1
    assert named in capsys.readouterr().out
    changed = load("job.yaml", [*held, *overrides])
    with pytest.raises(SetupRefused, match=named) as refused:
        check_certificate(changed, load_tokenizer(changed), 1)
    assert refused.value.kind == "certificate"


def test_a_job_starts_on_as_many_ranks_as_were_checked(job, check):
    check(job(), "--only", "config,file")
    held = load("job.yaml", ["data.certificate=out/check.json"])
    with pytest.raises(SetupRefused, match="ranks: 1 were checked, now 2"):
        check_certificate(held, load_tokenizer(held), 2)


def test_a_certificate_of_a_difference_starts_no_job(job, check):
    check(job([*LINES, row("nobody answers")]), "--only", "file")
    held = load("job.yaml", ["data.certificate=out/check.json"])
    with pytest.raises(SetupRefused, match="got 'differs'"):
        check_certificate(held, load_tokenizer(held), 1)


@pytest.fixture
def dry_run(capsys):
    """Runs a dry run of the job with the certificate; gives its exit status and what it printed."""

    def run(*words, certificate="out/check.json"):
        capsys.readouterr()
        named = [f"data.certificate={certificate}"] if certificate else []
        status = train(["--config", "job.yaml", "--dry-run", *named, *words])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_a_dry_run_refuses_another_certificate_as_a_run_does(job, check, dry_run):
    """R-SETUP-23: and writes no index."""
    job()
    status, printed = dry_run()
    assert status == 2, "a certificate that is not there"
    assert "out/check.json" in printed
    assert check(["job.yaml"], "--only", "config,file", "--world-size", "2")[0] == 0
    index = next(Path().glob(".rows.jsonl*index"))
    kept = index.read_bytes()
    status, printed = dry_run("--world-size", "2")
    assert status == 0, printed
    assert "certificate" not in printed
    status, printed = dry_run("--world-size", "1")
    assert (status, "ranks: 2 were checked, now 1. To fix" in printed) == (2, True), printed
    change_a_byte(Path("rows.jsonl"))
    status, printed = dry_run("--world-size", "2")
    assert (status, "were checked, now" in printed) == (2, True), printed
    assert index.read_bytes() == kept, "a dry run writes nothing"


def test_a_dry_run_notes_parts_of_its_certificate_that_are_not_on_this_machine(job, check, dry_run):
    check(job(), "--only", "config,file")
    Path("rows.jsonl").rename("elsewhere.jsonl")
    Path("tokenizer").rename("elsewhere")
    status, printed = dry_run()
    assert status == 0, printed
    begins = "note: not compared with the certificate out/check.json: the"
    assert f"{begins} file rows.jsonl, which is not on this machine" in printed
    assert f"{begins} tokenizer tokenizer, which is not on this machine" in printed
    assert dry_run("sft.seed=1")[0] == 2, "the configuration is compared all the same"


def test_a_refused_certificate_starts_no_dry_run_and_refuses_no_check(job, check, dry_run):
    words = job([*LINES, row("nobody answers")])
    check(words, "--only", "file")
    status, printed = dry_run()
    assert (status, "got 'differs'" in printed) == (2, True), printed
    status, _, made = check([*words, "data.certificate=out/check.json"], "--only", "config")
    assert (status, made["verdict"]) == (0, "partial")


@pytest.mark.parametrize("certificate", ["out/check.json", "held/check.json"])
def test_the_command_of_a_refusal_makes_a_certificate_that_the_run_accepts(job, check, dry_run, certificate, tmp_path):
    job()
    said = ["policy.train_global_batch_size=4", "model.ffn_hidden_size=${model.hidden_size}", "--world-size", "2"]
    check(["job.yaml"], "--only", "config,file")
    status, printed = dry_run(*said, certificate=certificate)
    assert status == 2
    assert ".." not in printed.replace(str(tmp_path), "")
    (command,) = re.findall(r"\((packproof check .*)\)[,\n]", printed)
    assert main([*shlex.split(command)[2:], "--only", "config,file"]) == 0
    assert dry_run(*said, certificate=certificate)[0] == 0


def test_verify_of_a_certificate_that_starts_no_job_ends_with_1(job, check, capsys):
    check(job([*LINES, row("nobody answers")]), "--only", "file")
    capsys.readouterr()
    assert main(["--verify", "out/check.json"]) == 1
    printed = capsys.readouterr().out
    assert "file, tokenizer and configuration are still those" in printed
    assert "its verdict must be proven or partial, got differs" in printed


@pytest.mark.parametrize("text", ["", "{}", '{"format": "packproof-check/1"}'])
def test_a_file_that_is_not_a_certificate_is_bad_input(job, text, capsys):
    job()
    Path("check.json").write_text(text)
    assert main(["--verify", "check.json"]) == 2
    assert "certificate" in capsys.readouterr().err


def result(name, status="equal", compared=1):
    return PartResult(name=name, status=status, compared=compared)


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ({}, "proven"),
        ({"rows": result("rows", compared=0)}, "differs"),
        ({"rows": result("rows", "not run")}, "differs"),
        ({"rows": result("rows", "differs")}, "differs"),
        ({"file": result("file", "loses")}, "differs"),
        ({"config": result("config", "refused"), "rows": result("rows", "differs")}, "refused"),
        ({"layout": None}, "differs"),
    ],
)
def test_nothing_is_proven_by_default(parts, verdict):
    whole = {name: result(name) for name in PARTS} | parts
    assert verdict_of([each for each in whole.values() if each is not None], list(PARTS)) == verdict


@pytest.mark.parametrize(
    "options", [["--budget", "soon"], ["--budget", "0"], ["--rows", "0"], ["--only", "rows,colums"], []]
)
def test_bad_options_end_with_2(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*(["job.yaml"] if options else []), *options])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_a_spent_budget_is_reported_and_proves_nothing(job, check):
    status, printed, made = check(job(), "--budget", "0.000001s", *TWO_SIDES)
    assert (status, made["verdict"]) == (1, "differs")
    assert "before the budget was spent" in "".join(made["not_shown"])
    assert "not proven" in printed


def test_a_job_that_cannot_be_opened_is_no_tick_and_the_parts_behind_it_say_why(job, check):
    words = job(**{"policy.tokenizer.name": "othertok"})
    larger = load_tokenizer(load("job.yaml"))
    larger.add_tokens([f"another word {number}" for number in range(9)])
    larger.save_pretrained("othertok")
    status, printed, made = check(words, "--only", "config,file")
    assert status == 2
    assert "nothing against this job" not in printed
    assert "✗ Configuration  1 reason against this job on 1 rank" in printed
    assert re.search(r"file: not run because the job is refused \(model.vocab_size .*must be at least", printed)
    assert "rows: left out" in made["not_shown"]
    assert "not run" in Path("out/check.html").read_text()


def test_a_file_of_which_most_rows_are_overfull_is_no_tick(job, check):
    """The preset allows cuts, but nobody packs most rows too long on purpose."""
    long = row("word " * 3000, "an answer behind the cut")
    mostly = job([long] * 20 + [row("one", "two")] * 2)
    status, printed, made = check(mostly, "--only", "file")
    assert (status, made["verdict"], made["parts"]["file"]["status"]) == (1, "differs", "loses")
    assert "90.9 % of its rows are overfull" in made["parts"]["file"]["findings"][0]["what"]
    assert "✗ Every row" in printed
    assert "not proven" in printed
    status, printed, made = check(job([long] * 11 + [row("one", "two")] * 11), "--only", "file")
    assert (status, made["parts"]["file"]["status"]) == (0, "equal"), "half of the rows is a note"
    assert "50.0 % of its rows are overfull" in made["parts"]["file"]["notes"][0], "and the first of the notes"


def test_a_refused_key_names_the_key_of_the_yaml_that_ignores_it(job, check):
    turns = [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"x": 1}]}]
    words = job([row("one", "two")] * 40 + [json.dumps({"messages": turns})])
    _, printed, _ = check(words, "--only", "file")
    assert "name it in data.train.ignore_keys" in printed
    assert "--ignore-keys" not in printed
    status, _, _ = check(
        [*words, "data.train.ignore_keys=[tool_calls]", "data.validation.ignore_keys=[tool_calls]"], "--only", "file"
    )
    assert status == 0


@pytest.mark.parametrize("rows", [2, 60], ids=["among the first rows", "behind the first rows"])
def test_a_truncated_last_line_is_reported_with_line_and_kind(job, check, rows):
    words = job([row("one", "two")] * rows)
    with Path("rows.jsonl").open("a") as file:
        file.write(row("one", "two")[:-9])
    status, _, made = check(words, "--only", "config,file")
    assert status == 2
    (fault,) = made["parts"]["config"]["findings"]
    assert f"rows.jsonl, line {rows + 1}" in fault["where"]
    assert "truncated_last_line" in fault["what"]
