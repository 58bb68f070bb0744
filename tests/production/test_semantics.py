"""The presets against the table of docs/SPEC.md#presets, and parsing them by name."""

import dataclasses
import re
from pathlib import Path

import pytest

from production.errors import PackproofError
from production.semantics import CHOICES, DEFAULT_PRESET, PRESETS, Semantics, parse

SPEC = Path(__file__).resolve().parents[2] / "docs" / "SPEC.md"


def spec_table():
    """{field: {column: cell}} of the table whose first column is headed `field`."""
    lines = SPEC.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(r"\|\s*field\s*\|", line))
    header = [cell.strip().strip("`") for cell in lines[start].strip("|").split("|")]
    table = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        table[cells[0].strip("`")] = dict(zip(header[1:], cells[1:], strict=True))
    return table


def test_every_preset_is_the_table_of_spec():
    table = spec_table()
    assert set(table) == set(CHOICES)
    columns = [column for column in next(iter(table.values())) if column != "other values"]
    assert set(columns) == set(PRESETS)
    checked = 0
    for preset in columns:
        for field, row in table.items():
            assert getattr(PRESETS[preset], field) == row[preset], (preset, field)
            checked += 1
    assert checked == len(PRESETS) * len(CHOICES)


def test_every_field_has_the_values_of_the_table_and_no_other():
    for field, row in spec_table().items():
        others = [value.strip() for value in row["other values"].split(",") if value.strip()]
        assert {*(row[preset] for preset in PRESETS), *others} == set(CHOICES[field]), field


def test_the_default_is_the_preset_that_spec_names():
    assert Semantics() == PRESETS[DEFAULT_PRESET]
    assert f"The default is `{DEFAULT_PRESET}`" in SPEC.read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_crosses_by_its_name(preset):
    assert parse(preset) == PRESETS[preset]


def test_overrides_change_single_fields():
    strict = PRESETS["strict"]
    found = parse("strict,lost_conversations=refuse,turn_check=relative")
    assert found == dataclasses.replace(strict, lost_conversations="refuse", turn_check="relative")


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("stict", "strict"),
        ("megatron-lm", "megatron-lm-main"),
        ("Strict", "strict"),
        ("", "strict"),
        ("strict,lost_conversation=refuse", "lost_conversations"),
        ("strict,refuse", "turn_rules"),
        ("strict,lost_conversations=refused", "refuse"),
        ("strict,padding_mask=by-value", "by_value"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(text, nearest):
    with pytest.raises(PackproofError) as error:
        parse(text)
    if text not in {"", "strict,refuse"}:  # nothing is near these; any valid name will do
        assert f"nearest is {nearest!r}" in error.value.what
    assert "nearest is" in error.value.what
    assert error.value.fix


def test_a_field_set_twice_is_an_error():
    with pytest.raises(PackproofError, match="must be set once"):
        parse("strict,turn_check=exact,turn_check=relative")


def test_a_value_that_no_field_has_cannot_be_built():
    with pytest.raises(PackproofError, match="turn_check"):
        Semantics(turn_check="roughly")
