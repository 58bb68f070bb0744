"""The reference's table of presets is SPEC's."""

import dataclasses
import re
from pathlib import Path

import pytest

from reference.semantics import PRESETS, Semantics, semantics

DOCS = Path(__file__).parents[2] / "docs"
SPEC = (DOCS / "SPEC.md").read_text()


def spec_table():
    lines = SPEC.split("## Presets")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    presets = [name.strip("`") for name in rows[0][1:-1]]
    return {
        preset: {row[0].strip("`"): row[column] for row in rows[2:]} for column, preset in enumerate(presets, start=1)
    }


def test_presets_are_those_of_spec():
    assert {name: dataclasses.asdict(value) for name, value in PRESETS.items()} == spec_table()


def test_the_default_is_megatron_lm_0_19():
    assert Semantics() == PRESETS["megatron-lm-0.19"]


def test_a_name_with_overrides():
    value = semantics("strict,lost_conversations=refuse,row_ends=any")
    assert value == dataclasses.replace(PRESETS["strict"], lost_conversations="refuse", row_ends="any")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Strict",
        "strict,nothing=1",
        "strict,row_ends",
        "strict,row_ends=some",
        "strict,",
        "strict,row_ends=any,row_ends=any",
    ],
)
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match=r"preset|field|choose|twice"):
        semantics(name)


def test_every_rule_of_spec_is_cited_by_the_code_that_is_it():
    pages = "".join(path.read_text() for path in [DOCS / "SPEC.md", *DOCS.glob("spec-*.md")])
    rules = set(re.findall(r"\*\*(R-[A-Z]+-\d+)[a-z]?\*\*", pages))
    root = Path(__file__).parents[2]
    cited = set()
    for file in (
        path for room in ("reference", "production", "equivalence", "tools") for path in root.glob(f"{room}/**/*.py")
    ):
        text = file.read_text()
        cited |= set(re.findall(r"R-[A-Z]+-\d+", text))
        for family, first, last in re.findall(r"(R-[A-Z]+)-(\d+) to (?:R-[A-Z]+-)?(\d+)", text):
            cited |= {f"{family}-{number}" for number in range(int(first), int(last) + 1)}
    assert len(rules) > 150
    assert rules - cited == set()
