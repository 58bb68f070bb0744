"""`packproof check --cache`: the row cache of a job before its start is the one that the job's own loader would leave."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from production.errors import PackproofError
from production.parallel.sizes import RankCoordinates
from production.training.__main__ import main as train
from production.training.config import load
from production.training.data.batch_stream import BatchStream
from production.training.data.dataset import BadRow, PackedData
from production.training.data.order import Sample
from tools.check.__main__ import main

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "examples" / "packed" / "sample.jsonl.packed").read_text().split("\n")[:12]
VALIDATION = (ROOT / "examples" / "packed" / "sample.jsonl.packed").read_text().split("\n")[12:16]
SYSTEM = {"role": "system", "content": ""}
EMPTY_ANSWER = json.dumps({"messages": [SYSTEM, {"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}]})  # fmt: skip
"""A row that the builder refuses."""
PLACE = RankCoordinates(
    rank=0, world_size=1, tensor_rank=0, context_rank=0, context_size=1, data_rank=0, data_size=1, pipeline_rank=0,
    pipeline_size=1,
)  # fmt: skip
CACHE = "data.cache_dir=rows"
JOB = f"""\
defaults: {ROOT}/examples/jobs/small-cpu.yaml
policy:
  tokenizer: {{name: tokenizer}}
  train_global_batch_size: 2
data:
  train: {{dataset_name: megatron_sft_packed, data_path: rows.jsonl}}
  validation: {{dataset_name: megatron_sft_packed, data_path: validation.jsonl}}
"""


@pytest.fixture(autouse=True)
def _job(tmp_path, monkeypatch):
    """A job of a training and a validation file; the working folder is the job's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    shutil.copytree(ROOT / "examples" / "tokenizers" / "nemotron-mini", "tokenizer")
    write(LINES)
    Path("validation.jsonl").write_text("".join(line + "\n" for line in VALIDATION))
    Path("job.yaml").write_text(JOB)


def write(lines):
    Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))


@pytest.fixture
def built(monkeypatch):
    """Every sample that is built and not read from a cache, in this process."""
    samples, build = [], PackedData._build

    def watch(self, wanted):
        samples.extend(wanted)
        return build(self, wanted)

    monkeypatch.setattr(PackedData, "_build", watch)
    return samples


def check(*words, only="config"):
    return main(["job.yaml", "--cache", "--only", only, "--out", "out", *words])


def cached():
    return json.loads(Path("out/check.json").read_text())["parts"]["cache"]


def bits(item):
    if isinstance(item, PackproofError):
        return type(item), vars(item)
    values = ((each.name, getattr(item, each.name)) for each in dataclasses.fields(item))
    return [(n, (v.dtype, v.numpy().tobytes()) if isinstance(v, torch.Tensor) else v) for n, v in values]


def rows_of_job(*overrides):
    """Every row of the job as its loader prepares it."""
    with BatchStream(load("job.yaml", ["data.num_workers=0", *overrides]), PLACE) as stream:
        return [
            bits(item)
            for _, sources, data in stream.packed_data()
            for number, source in enumerate(sources)
            for item in data.prepare([Sample(source=number, row=row, epoch=0) for row in range(len(source))])
        ]


def test_a_job_after_a_check_builds_no_row_and_trains_the_same_numbers(built):
    def run(name, *overrides):
        built.clear()
        words = [
            "data.num_workers=0",
            "sft.max_num_steps=4",
            f"logger.log_dir={name}",
            "checkpointing.enabled=false",
            *overrides,
        ]
        assert train(["--config", "job.yaml", *words]) == 0
        lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
        exact = ("loss", "grad_norm")
        return len(built), [(key, each[key]) for each in lines for key in each if any(word in key for word in exact)]

    assert check(CACHE, "--processes", "1") == 0
    assert len(built) == len(LINES) + len(VALIDATION)
    without, wanted = run("without")
    after, found = run("after", CACHE)
    assert (without > 0, after) == (True, 0)
    assert found == wanted
    assert len({key for key, _ in found}) > 1
    assert len(found) >= 8


def test_rows_of_several_processes_are_equal_to_the_bit_and_a_second_check_builds_none(built, capsys):
    wanted = rows_of_job()
    built.clear()
    assert check(CACHE, "--processes", "3") == 0
    first = cached()
    assert built == [], "children built them"
    assert "16 rows stored in rows" in capsys.readouterr().out
    assert rows_of_job(CACHE) == wanted
    assert check(CACHE, "--processes", "1") == 0
    assert built == []
    again = cached()
    assert [each["stored_now"] for each in first["numbers"]["caches"]] == [len(LINES), len(VALIDATION)]
    assert [each["stored_now"] for each in again["numbers"]["caches"]] == [0, 0]
    for each in again["numbers"]["caches"]:
        assert each["rows"] == each["stored"]
        assert each["bytes"] == sum(file.stat().st_blocks * 512 for file in Path(each["folder"]).iterdir())
        assert f"{each['bytes']:,} bytes in {each['folder']}" in Path("out/check.html").read_text()


def test_a_refused_row_is_refused_alike(built):
    write([*LINES, EMPTY_ANSWER])
    wanted = rows_of_job()
    assert check(CACHE, "--processes", "1") == 0
    assert cached()["numbers"]["caches"][0]["refused"] == {"empty_assistant": 1}
    built.clear()
    assert rows_of_job(CACHE) == wanted
    assert built == []
    assert [each[1]["kind"] for each in wanted if each[0] is BadRow] == ["empty_assistant"]


def test_an_unreadable_line_is_listed_and_stays_out_of_the_cache():
    write(
        [*LINES * 8, '{"messages": 1}', *LINES]
    )  # not among the first rows or at the end, which a job looks at before it starts
    wanted = rows_of_job()
    assert check(CACHE) == 0
    assert cached()["numbers"]["caches"][0]["left_out"] == {"row_not_list": 1}
    assert rows_of_job(CACHE) == wanted


def test_another_setting_makes_another_cache(built):
    assert check(CACHE, "--processes", "1") == 0
    assert check(CACHE, "--processes", "1", "policy.max_total_sequence_length=1024") == 0
    assert len(built) == 2 * (len(LINES) + len(VALIDATION))
    assert len([each for each in Path("rows").iterdir() if each.is_dir()]) == 4


def test_files_that_are_read_alike_are_stored_once(built):
    assert check(CACHE, "--processes", "1", "data.validation.data_path=rows.jsonl") == 0
    assert len(built) == len(LINES)


def test_a_job_without_a_cache_is_refused_with_the_key(capsys):
    assert check() == 2
    said = capsys.readouterr().err
    assert "data.cache_dir" in said
    assert "To fix it: add data.cache_dir=DIR" in said
    assert not Path("out").exists()


def test_a_cache_of_conversations_is_refused(capsys):
    assert check(CACHE, "data.train.dataset_name=openai_format") == 2
    assert "online path (chat files), whose rows are not cached" in capsys.readouterr().err


def test_a_cache_and_a_verification_are_not_asked_at_once(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--cache", "--verify", "check.json"])
    assert ended.value.code == 2
    assert "--cache" in capsys.readouterr().err


def test_a_job_that_is_refused_gets_no_cache():
    assert check(CACHE, "policy.train_global_batch_size=0") == 2
    assert not Path("rows").exists() or not list(Path("rows").glob("*/*.rows"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.cache_limit_gb=0.00001"], "found no room"),
        (["--budget", "0.001s"], "were reached before the budget was spent"),
    ],
)
def test_a_cache_that_is_not_whole_fails_the_check(words, told, capsys):
    assert check(CACHE, "--processes", "1", *words) == 1
    assert cached()["status"] == "not cached"
    assert told in capsys.readouterr().out


def test_checks_at_the_same_time_and_a_killed_one_leave_the_rows_of_the_job():
    write(list(itertools.islice(itertools.cycle(LINES), 400)))
    wanted = rows_of_job()
    command = [
        sys.executable,
        "-m",
        "tools.check",
        "job.yaml",
        CACHE,
        "--cache",
        "--only",
        "config",
        "--processes",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    def begin(name):
        return subprocess.Popen([*command, "--out", name], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip

    killed = begin("killed")
    try:
        ends = time.monotonic() + 120
        while killed.poll() is None and not [each for each in Path("rows").glob("*/*.rows") if each.stat().st_size]:
            assert time.monotonic() < ends
            time.sleep(0.01)
    finally:
        killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it was killed in the middle"
    assert not Path("killed/check.json").exists()
    both = [begin("one"), begin("two")]
    assert [each.wait() for each in both] == [0, 0]
    assert rows_of_job(CACHE) == wanted
