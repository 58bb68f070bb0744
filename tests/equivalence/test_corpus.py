"""Every saved case, replayed by every witness: they agree with each other and with what the case expects."""

import pytest

from equivalence.cases.store import SAVED, replay
from equivalence.runner.row_cases import check_case
from equivalence.subjects import load

CASES = {path.stem: case for path, case in replay(kinds=["rows"])}


@pytest.mark.parametrize("name", CASES)
def test_a_saved_case_is_equal_on_every_side(name):
    case = CASES[name]
    result = check_case(case, [load(side) for side in ("reference", "production", "megatron_lm")])
    assert result.equal, "\n".join(
        f"{finding.left} and {finding.right}: {finding.differences[0]}" for finding in result.findings
    )
    assert len(result.rows) >= 2, "a case that a single side builds compares nothing"


def test_there_are_saved_cases_with_right_values():
    assert SAVED.is_dir()
    assert sum(case.expected is not None for case in CASES.values()) >= 14
    assert all(case.note for case in CASES.values())
