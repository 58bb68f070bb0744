"""Every block of the guides is current: Python runs, cheap commands run, the others are taken by their own parsers or dry runs."""

import ast
import contextlib
import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

GUIDES = ROOT / "docs" / "guides"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.worlds


YAML_FILES = ("job.yaml", "chat.yaml")
"""What the guide to a run calls its YAML blocks, in order."""


def yaml_of(name):
    """The guide's YAML of this name."""
    texts = [text for language, text in blocks("from-packed-file-to-run.md") if language == "yaml"]
    return texts[YAML_FILES.index(name)]


def blocks(guide):
    """Language and text of each fenced block, in order."""
    return FENCE.findall((GUIDES / guide).read_text())


def commands(text):
    """The command lines of a shell block, continued lines joined."""
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like a checkout from the inside, so that what the guides write lies there."""
    for name in ("examples", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(text, names, where):
    exec(compile(text, where, "exec"), names)  # the guide's own code is what is tested


MAINS = {
    "tools.pack_rows": "tools.pack_rows.cli",
    "tools.diff_row": "tools.diff_row.__main__",
    "tools.simulate": "tools.simulate.__main__",
    "production.adapters.plain_torch": "production.adapters.plain_torch",
}
"""Cheap commands, by module: run in this process."""


def main_of(module):
    return __import__(module, fromlist=["main"]).main


def check_command(words, done):
    """Run a command, or have its parser take it; counts what was done under its name."""
    if words[0] == "make":
        text = (ROOT / "Makefile").read_text()
        recipe = re.search(rf"^{words[1]}:.*\n\t(.*)$", text, re.MULTILINE)[1]
        words = shlex.split(recipe.replace("$(BIN)/", "").replace("$(ARGS)", "").partition("OMP_NUM_THREADS=1 ")[2])
    if words[0] == "torchrun":
        at = words.index("-m")
        ranks = int(words[words.index("--nproc-per-node") + 1])
        words = ["python", *words[at:], "--dry-run", "--world-size", str(ranks)]
    assert words[:2] == ["python", "-m"], words
    module, given = words[2], words[3:]
    if module in MAINS and "--fed" not in given:
        outcome = main_of(MAINS[module])(given)
        assert outcome == 0 or isinstance(outcome, list), words
        done[f"ran {module}"] += 1
    elif module == "production.training":
        assert main_of("production.training.__main__")(given) == 0, words
        done["dry runs"] += 1
    else:
        parse(module, given)
        done[f"parsed {module}"] += 1


def parse(module, given):
    """As the command's own `main` parses it, without running it."""
    from equivalence.__main__ import Run
    from tools.compare_runs import live, recorded
    from tools.diff_row.__main__ import parse as parse_diff_row

    kinds = {
        ("equivalence", "run"): Run,
        ("tools.compare_runs", "recorded"): recorded.Arguments,
        ("tools.compare_runs", "live"): live.Arguments,
    }
    if module == "tools.diff_row":
        parse_diff_row(given)
    else:
        tyro.cli(kinds[module, given[0]], args=given[1:])


def megatron_log(path, losses):
    """A log as Megatron-LM prints it."""
    lines = [
        f" [2026-01-01 00:00:00] iteration {step:8d}/ {len(losses):7d} | consumed samples: {4 * step:12d} | "
        f"elapsed time per iteration (ms): 1000.0 | learning rate: 1.0E-03 | global batch size:     4 | "
        f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        f"number of nan iterations:   0 |"
        for step, loss in enumerate(losses, start=1)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_the_guide_to_a_run_is_current(checkout, capsys):
    names, done = {}, Counter()
    for number, (language, text) in enumerate(blocks("from-packed-file-to-run.md")):
        if language == "python":
            run_python(text, names, f"block {number}")
            done["python"] += 1
        elif language == "yaml":
            (checkout / YAML_FILES[done["yaml"]]).write_text(text)
            done["yaml"] += 1
        else:
            for words in commands(text):
                check_command(words, done)
    assert done == {
        "python": 2,
        "yaml": 2,
        "ran tools.pack_rows": 1,
        "ran tools.diff_row": 2,
        "ran tools.simulate": 1,
        "dry runs": 9,
        "parsed equivalence": 1,
        "parsed tools.diff_row": 1,
        "parsed tools.compare_runs": 3,
    }
    assert len(names["source"]) > 10
    assert names["counts"]["trained_tokens"] > 1000
    assert re.search(r"^ranks +512$", capsys.readouterr().out, re.MULTILINE)
    assert "<html" in (checkout / "row.html").read_text()[:200].lower()


def test_the_guides_comparison_with_a_log_runs(checkout):
    from production.training.metrics.loggers import JsonLines, Record

    given = next(
        words
        for language, text in blocks("from-packed-file-to-run.md")
        if not language
        for words in commands(text)
        if "recorded" in words
    )
    losses = [8.0 - step / 10 for step in range(20)]
    megatron_log(checkout / "megatron.log", losses)
    (checkout / "results" / "mine" / "logs").mkdir(parents=True)
    lines = JsonLines(checkout / "results" / "mine" / "logs" / "metrics.jsonl")
    with contextlib.closing(lines):
        for step, loss in enumerate(losses, start=1):
            lines.log(Record(kind="step", step=step, values={"loss": loss, "step_seconds": 1.0, "gradient_norm": 1.0}))
    assert main_of("tools.compare_runs.__main__")(given[3:]) == 0
    assert "8" in (checkout / "runs.html").read_text()


SMALL = {
    "sft.val_at_start": "false",
    "sft.val_period": "0",
    "sft.val_batches": "1",
    "policy.train_global_batch_size": "1",
    "model.num_layers": "1",
    "model.hidden_size": "16",
    "model.ffn_hidden_size": "32",
    "model.num_attention_heads": "2",
    "policy.megatron_cfg.scheduler.lr_warmup_iters": "0",
    "policy.megatron_cfg.scheduler.lr_decay_iters": "20",
    "data.num_workers": "0",
    "logger.progress": "false",
    "logger.tensorboard_enabled": "false",
}
"""What makes the guide's job a matter of seconds; nothing of its data."""


def run_job(overrides, _worker):
    """On the one rank of a world: the guide's job, or that of `config`."""
    from production.training.config import load
    from production.training.trainer import run

    given = {**SMALL, **overrides}
    config = given.pop("config", "job.yaml")
    outcome = run(load([config], [f"{key}={value}" for key, value in given.items()]))
    return outcome.step, [(each.step, each.loss, each.learning_rate) for each in outcome.numbers]


def test_the_guides_job_runs_resumes_and_its_dump_is_held_against_the_reference(checkout, capsys):
    """Each run in a world of its own, as torchrun would start it."""
    from equivalence.workers import open_world, preload

    (checkout / "job.yaml").write_text(yaml_of("job.yaml"))
    every = [
        words for language, text in blocks("from-packed-file-to-run.md") if not language for words in commands(text)
    ]
    check_command(next(words for words in every if "tools.pack_rows" in words), Counter())
    preload("production.training.trainer", "production.training.data.batch_dump", "transformers")
    runs = []
    for overrides in ({"sft.max_num_steps": 2}, {"sft.max_num_steps": 3, "logger.dump_batch_steps": "[3]"}):
        with open_world(1) as world:
            (outcome,) = world.run(f"{__name__}:run_job", overrides)
        runs.append(outcome)
    assert [step for step, _ in runs] == [2, 3]
    assert [number for number, *_ in runs[1][1]] == [3]  # it went on where the first had ended
    losses = [loss for _, numbers in runs for _, loss, _ in numbers]
    assert all(7 < loss < 10 for loss in losses)  # of 4096 ids: about log 4096 = 8.3
    capsys.readouterr()
    fed = next(words for words in every if "--fed" in words)
    assert main_of("tools.diff_row.__main__")(fed[3:]) == 0
    assert capsys.readouterr().out


def test_the_guides_job_on_ordinary_chat_files_runs(checkout):
    from equivalence.workers import open_world, preload

    (checkout / "chat.yaml").write_text(yaml_of("chat.yaml"))
    preload("production.training.trainer", "production.training.data.batch_dump", "transformers")
    with open_world(1) as world:
        ((step, numbers),) = world.run(f"{__name__}:run_job", {"config": "chat.yaml", "sft.max_num_steps": 2})
    assert step == 2
    assert all(7 < loss < 10 for _, loss, _ in numbers)
    records = [json.loads(line) for line in (checkout / "results/chat/logs/metrics.jsonl").read_text().splitlines()]
    assert sum("mtp_2_loss" in str(record) for record in records) >= 2
    assert any("validation_loss" in str(record) for record in records)


@pytest.mark.usefixtures("checkout")
@pytest.mark.filterwarnings("ignore:'type' is deprecated:DeprecationWarning:argparse")
def test_the_guide_to_ones_own_trainer_is_current():
    names, done = {}, Counter()
    for number, (language, text) in enumerate(blocks("own-trainer.md")):
        if language == "python":
            run_python(text, names, f"block {number}")
            done["python"] += 1
        elif language == "text":
            assert set(re.findall(r"^--[\w-]+", text, re.MULTILINE)) <= megatron_arguments()
            done["text"] += 1
        else:
            for words in commands(text):
                check_command(words, done)
    assert done["python"] == 7
    assert done["text"] == 1
    assert done["ran production.adapters.plain_torch"] == done["ran tools.diff_row"] == 1
    assert names["script"].is_distributed


@pytest.mark.usefixtures("checkout")
def test_the_guide_to_a_loss_that_is_off_is_current(capsys):
    """The batch is row 17 of the sample as a trainer has it: Megatron-LM's names, and a mask of bool."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from production.files.source import open_source
    from production.rows.builder import RowBuilder, RowSettings

    tokenizer = AutoTokenizer.from_pretrained("examples/tokenizers/nemotron-mini")
    builder = RowBuilder(tokenizer=tokenizer, settings=RowSettings(pack_length=2048, prompt_format="nemotron-nano-v2"))
    with open_source("examples/packed/sample.jsonl.packed") as source:
        row = builder.build(source[17])
    batch = {"input_ids": row.input_ids[None], "labels": row.target_ids[None], "loss_mask": row.token_mask[None].bool()}
    names, done = {"batch": batch | {"position_ids": row.position_ids[None]}}, Counter()
    # What a trainer dumps whose model shifts labels: the token itself, -100 where it does not train, and no mask.
    trained = torch.where(row.token_mask != 0, row.target_ids, -100)
    save_file(
        {
            "input_ids": row.input_ids[None],
            "labels": torch.cat([torch.tensor([-100]), trained[:-1]])[None],
            "position_ids": row.position_ids[None],
        },
        "shifted-by-the-model.safetensors",
    )
    for number, (language, text) in enumerate(blocks("your-loss-is-off.md")):
        if language == "python":
            run_python(text, names, f"block {number}")
            done["python"] += 1
        else:
            for words in commands(text):
                check_command(words, done)
    assert done == {
        "python": 1,
        "ran tools.diff_row": 4,
        "parsed tools.compare_runs": 1,
        "parsed equivalence": 1,
    }
    assert "the dump is row 17 of the file, found by its ids" in capsys.readouterr().out


def megatron_arguments():
    """Every option that the installed Megatron-LM takes."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("guide", sorted(path.name for path in GUIDES.glob("*.md")))
def test_links_and_names_in_a_guide_exist(guide):
    text = (GUIDES / guide).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert links
    for link in links:
        assert (GUIDES / link).exists(), link
    for language, block in blocks(guide):
        if language == "python":
            ast.parse(block)


def readme_commands():
    """The command lines of the README and of docs/commands.md, without their comments and dots."""
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "commands.md").read_text()
    for language, block in FENCE.findall(text):
        if not language:
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.replace("key=value …", ""), comments=True):
                    yield words


@pytest.mark.usefixtures("checkout")
def test_the_commands_of_the_readme_and_of_the_page_of_commands_are_current():
    """Make targets exist, jobs pass a dry run, comparisons are parsed, and the sample's faulty side is found."""
    done = Counter()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in readme_commands():
        if words[0] == "make" and words[1] != "train":
            assert words[1] in targets
            done["make"] += 1
        elif "equivalence.mutants.subjects:shift_twice" in " ".join(words):
            assert main_of("tools.diff_row.__main__")(words[3:]) == 1
            done["ran tools.diff_row"] += 1
        else:
            check_command(words, done)
    assert done == {"make": 2, "ran tools.diff_row": 1, "dry runs": 3, "parsed equivalence": 2}


def test_links_in_the_readme_exist():
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())]
    assert len(links) > 15
    for link in filter(None, links):
        assert (ROOT / link).exists(), link


def test_the_guide_before_you_book_the_nodes_is_current(checkout, capsys):
    """Each `packproof` command runs here; the second one finds what the guide's other packer did."""
    from tools.__main__ import main as packproof

    names, statuses, printed = {}, [], []
    for number, (language, text) in enumerate(blocks("before-you-book-the-nodes.md")):
        if language == "python":
            run_python(text, names, f"block {number}")
        elif language == "yaml":
            (checkout / "job.yaml").write_text(text)
        else:
            for words in commands(text):
                if words[0] == "python":
                    check_command(words, Counter())
                    continue
                assert words[0] == "packproof"
                statuses.append(packproof([*words[1:], *(["--rows", "2"] if "first" in words else [])]))
                found = capsys.readouterr()
                printed.append(found.out)
    assert statuses == [0, 2, 1, 0, 0, 0, 0]  # inspect says that it found faults
    assert "rows stored in rows (" in printed[5]
    for told in (
        "line 46",
        "truncated_last_line",
        "line 44",
        "content_null",
        "line 45",
        "empty_assistant",
        "line 42: <|im_start|>",
        "line 43: 1 line ends in CRLF",
    ):
        assert told in printed[1], told
    assert "proven: nothing differs" in printed[3]
    assert "still those" in printed[4]
    assert json.loads((checkout / "quick" / "check.json").read_text())["verdict"] == "partial"
