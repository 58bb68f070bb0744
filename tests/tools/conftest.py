"""What the tests of the tools share: diff_row as its user calls it."""

import pytest

from tools.diff_row.__main__ import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs diff_row; gives its exit status, what it printed and what it said of errors."""

    def run(*arguments, columns=110):
        monkeypatch.setenv("COLUMNS", str(columns))
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
