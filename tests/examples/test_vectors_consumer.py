"""The example that reads the test vectors with the standard library alone."""

import json

import pytest

from examples import vectors_consumer
from packproof.__main__ import main as packproof_main


@pytest.fixture
def folder(tmp_path):
    assert packproof_main(["vectors", str(tmp_path)]) == 0
    return tmp_path


def test_its_thirty_lines_build_every_row_of_megatron_lm(folder, capsys):
    assert vectors_consumer.main(folder) == 0
    assert "281 of 281 rows are equal to megatron-lm-0.19's" in capsys.readouterr().out


def test_rows_of_another_preset_differ_and_the_first_is_printed(folder, capsys):
    assert vectors_consumer.main(folder, "strict") == 1
    assert "first difference:" in capsys.readouterr().out


def test_vectors_that_were_changed_cannot_be_used(folder, capsys):
    about = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**about, "format": 9}))
    assert vectors_consumer.main(folder) == 2
    assert "write them again" in capsys.readouterr().err
