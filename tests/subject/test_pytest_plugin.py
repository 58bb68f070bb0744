"""The pytest plugin: a decorated function is a test for each level and case, alone and under pytest-xdist."""

from pathlib import Path

import pytest

import packproof

HEAD = "import packers, packproof\n"
DECORATED = """
@packproof.conformance(level={level!r}, overlong="refuse", drawn=5, sets=("valid",){more})
def pack(*arguments):
    return packers.{name}(*arguments)
"""
CASES = 110 + 5


def run(pytester, name, *, level="L3", more="", options=()):
    pytester.makepyfile(test_mine=HEAD + DECORATED.format(level=level, name=name, more=more))
    return pytester.runpytest_inprocess("-p", "packproof.pytest_plugin", "-p", "no:cacheprovider", *options)


def test_each_level_is_a_test_of_each_case(pytester):
    result = run(pytester, "right")
    result.assert_outcomes(passed=3 * (CASES + 1))


def test_a_wrong_function_fails_at_its_level_alone_with_its_smallest_row(pytester):
    result = run(pytester, "leak")
    found = result.parseoutcomes()
    assert found["failed"] > 1
    assert found["failed"] + found["passed"] == 3 * (CASES + 1)
    screen = result.stdout.str()
    assert f"L3 is missed in {found['failed'] - 1} of " in screen
    assert "trains the label" in screen
    assert "   row 0  labels " in screen
    failed = [line for line in result.stdout.lines if line.startswith("FAILED")]
    assert len(failed) == found["failed"]
    assert all("pack[L3-" in line for line in failed)


def test_an_undeclared_convention_is_named(pytester):
    result = run(pytester, "unshifted", level="L2")
    result.stdout.fnmatch_lines(["*undeclared: looks like shift: model; declare it*"])


def test_a_level_that_is_not_shown_fails_unless_that_is_declared(pytester):
    result = run(pytester, "without_shards", level="L9")
    result.assert_outcomes(passed=9 * (CASES + 1) - 1, failed=1)
    result.stdout.fnmatch_lines(["L9 (*) is not shown: the rows have no shards. Return the field, or declare*"])


def test_a_level_that_need_not_be_shown_is_skipped_with_its_reason(pytester):
    result = run(pytester, "without_shards", level="L9", more=', not_shown=("L9",)', options=("-rs",))
    result.assert_outcomes(passed=9 * (CASES + 1) - 1, skipped=1)
    result.stdout.fnmatch_lines(["*the rows have no shards*"])


def test_workers_of_xdist_collect_the_same_tests(pytester):
    folders = [str(Path(__file__).parent), str(Path(packproof.__file__).parents[1])]
    pytester.makeconftest(f"import sys; sys.path[:0] = {folders!r}")
    result = run(pytester, "right", level="L2", options=("-p", "xdist", "-n", "2"))
    result.assert_outcomes(passed=2 * (CASES + 1))


def test_a_misspelt_convention_or_level_is_an_error_at_import():
    with pytest.raises(ValueError, match="did you mean 'model'"):
        packproof.conformance(level="L1", shift="modle")
    with pytest.raises(ValueError, match="no level is called"):
        packproof.conformance(level="L0")
    with pytest.raises(ValueError, match="preset must be one of megatron-lm"):
        packproof.conformance(level="L1", preset="stict")
    with pytest.raises(ValueError, match="sets has all"):
        packproof.conformance(level="L1", sets=("all",))
