"""`packproof`: one command line with every command of packproof behind it."""

import importlib
import tomllib
from pathlib import Path

import pytest

from tools.__main__ import ALIASES, COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_help_names_every_command_and_what_it_is_for(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed and command.when in printed for name, command in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["inspekt"]])
def test_no_command_and_an_unknown_one_end_with_the_help_and_status_2(capsys, arguments):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "usage: packproof" in printed
    assert all(f"there is no command {name!r}" in printed for name in arguments)


@pytest.mark.parametrize("name", [*COMMANDS, *ALIASES])
def test_every_command_has_a_main_that_takes_the_rest_of_the_line(name, monkeypatch):
    module = importlib.import_module(COMMANDS[ALIASES.get(name, name)].module)
    taken = []
    monkeypatch.setattr(module, "main", lambda arguments: taken.append(arguments) or 7)
    assert main([name, "--x", "1"]) == 7
    assert taken == [["--x", "1"]]


def test_the_command_and_its_older_names_are_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["packproof"] == "tools.__main__:main"
    modules = {target.partition(":")[0] for name, target in scripts.items() if name != "packproof"}
    assert modules <= {command.module for command in COMMANDS.values()} | {"tools.pack_rows"}
