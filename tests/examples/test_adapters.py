"""Adapters of other projects' packing, as far as the projects are installed here. docs/conformance.md has the table."""

import runpy
from pathlib import Path

from packproof.cases import drawn_cases, load_vectors
from packproof.judging import conformance_of

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"


def column(name):
    adapter = runpy.run_path(str(ADAPTERS / name))
    cases = [*load_vectors()[::4], *drawn_cases(20)]
    report = conformance_of(adapter["pack"], cases, subject=name, conventions=adapter["CONVENTIONS"], smallest=False)
    assert report.undeclared == {}
    return {each.level.name: each.status for each in report.levels}


def test_transformers_flattening_collator():
    expected = dict.fromkeys(("L1", "L2", "L3", "L4", "L5", "L7"), "yes")
    expected |= {"L6": "not shown", "L8": "no", "L9": "not shown", "L10": "no"}
    assert column("transformers_flattening.py") == expected
