"""Each level of conformance finds its kind of wrong packing function, and a right one passes all but equality to the bit."""

import re

import packers
import pytest

from packproof.cases import Case, drawn_cases, load_vectors
from packproof.conventions import MEGATRON_LM
from packproof.judging import FAILED, NOT_SHOWN, PASSED, UNDECLARED, conformance_of
from packproof.levels import LEVELS, NAMES, judge, level_named
from packproof.report import smallest, text
from packproof.verdict import Refused

CASES = [*load_vectors()[::3], *drawn_cases(40)]


def report_on(function, *, cases=CASES, conventions=packers.CONVENTIONS, preset="strict", is_small=True):
    return conformance_of(
        function, cases, subject=function.__name__, conventions=conventions, preset=preset, smallest=is_small
    )


def statuses(report):
    return {each.level.name: each.status for each in report.levels}


def test_a_right_packing_function_passes_every_level_but_the_last():
    report = report_on(packers.right)
    assert statuses(report) == {**dict.fromkeys(NAMES[:-1], PASSED), "L10": FAILED}
    assert report.undeclared == {}
    assert all(each.cases > 20 for each in report.levels)
    assert report.below("L9") == []
    assert [each.level.name for each in report.below("L10")] == ["L10"]


# The level at which each fault is found; faults that break a second property miss that level as well.
FAULTS = {
    "wrong_token": {"L1", "L5", "L6", "L7", "L9"},
    "shift_twice": {"L2", "L6"},
    "everything_trains": {"L2", "L3", "L6"},
    "leak": {"L3", "L6"},
    "positions_go_on": {"L4"},
    "positions_stand": {"L4"},
    "one_segment": {"L5", "L9"},
    "padding_trains": {"L3", "L6"},
    "loses_the_last": {"L7"},
    "share_twice": {"L9"},
    "own_label_lost": {"L9"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_packing_function_is_caught_at_its_level_and_the_screen_says_which(name):
    report = report_on(getattr(packers, name))
    missed = {each.level.name for each in report.levels[:-1] if each.status == FAILED}
    first = min(FAULTS[name], key=NAMES.index)
    assert min(missed, key=NAMES.index) == first
    assert missed <= FAULTS[name]
    result = report.levels[NAMES.index(first)]
    screen = text(report, "L9", report.below("L9"))
    assert f"does not reach L9: {first} (no)" in screen
    assert result.miss.what in re.sub(r"\s+", " ", screen)
    assert result.level.rules.split(",")[0] in screen
    assert sum(len(each["tokens"]) for each in result.case.conversations) <= 3


def test_segments_that_do_not_divide_are_caught():
    report = report_on(packers.odd_chunks)
    assert statuses(report)["L8"] == FAILED
    assert report.levels[7].note == ""  # not only where the pack length is at fault


def test_an_undeclared_convention_is_reported_and_is_not_a_fault():
    report = report_on(packers.unshifted)
    assert report.undeclared == {"shift": "model", "pad_label": "ignore"}
    assert statuses(report)["L2"] == UNDECLARED
    assert report.levels[1].note == "looks like shift: model; declare it"
    assert FAILED not in set(list(statuses(report).values())[:-1])
    assert report.below("L2") == [report.levels[1]]
    declared = {**packers.CONVENTIONS, "shift": "model", "pad_label": "ignore"}
    assert set(list(statuses(report_on(packers.unshifted, conventions=declared)).values())[:-1]) == {PASSED}


def test_a_declared_convention_that_is_not_so_is_reported_as_well():
    report = report_on(packers.right, conventions={**packers.CONVENTIONS, "shift": "model"})
    assert report.undeclared == {"shift": "data"}


def test_overlong_conversations_may_be_refused_where_that_is_declared():
    assert report_on(packers.right, conventions={}).undeclared == {"overlong": "refuse"}


@pytest.mark.parametrize(
    ("conventions", "lengths", "missed"),
    [
        ({"last_token": "dropped"}, [1, 1], False),
        ({"last_token": "dropped"}, [1, 2], True),
        ({"overlong": "drop"}, [9, 9], False),
        ({"overlong": "drop"}, [9, 3], True),
        ({"overlong": "refuse"}, [9, 3], False),
        ({"overlong": "refuse"}, [3, 3], True),
        ({}, [0, 0], False),
        ({}, [9], True),
    ],
)
def test_a_refusal_is_no_miss_where_a_declared_convention_leaves_no_row(conventions, lengths, missed):
    conversations = tuple({"tokens": list(range(12, 12 + each)), "trained": [1] * each} for each in lengths)
    case = Case("drawn-0", "drawn", conversations, 8, 0, 2, 1)
    verdict = judge(case, Refused("nothing to pack"), {**MEGATRON_LM, **conventions}, "strict")
    assert ("L1" in verdict.misses) is missed


def test_a_function_that_refuses_everything_reaches_nothing():
    report = report_on(packers.refuses_all)
    assert statuses(report)["L1"] == FAILED
    assert "RuntimeError: no" in report.levels[0].miss.what
    assert {statuses(report)[name] for name in NAMES[1:9]} == {NOT_SHOWN}


def only(*fields):
    return lambda *arguments: [{name: pack[name] for name in fields} for pack in packers.right(*arguments)]


def bare(*arguments):
    return only("input_ids", "labels", "mask")(*arguments)


def without_boundaries(*arguments):
    return only("input_ids", "labels", "mask", "position_ids")(*arguments)


def test_a_level_without_its_field_is_not_shown_and_not_passed():
    report = report_on(bare)
    found = statuses(report)
    assert [name for name in NAMES if found[name] == NOT_SHOWN] == ["L4", "L5", "L8", "L9"]
    assert report.levels[3].note == "the rows have no position_ids"
    assert [each.level.name for each in report.below("L5")] == ["L4", "L5"]
    assert report.below("L5", ["L4", "L5"]) == []


def test_boundaries_are_derived_from_positions_and_that_is_reported():
    report = report_on(without_boundaries)
    assert statuses(report)["L5"] == statuses(report)["L8"] == PASSED
    assert report.levels[4].note == "judged from position_ids"


def test_a_mask_is_derived_from_the_labels():
    def no_mask(*arguments):
        packs = packers.right(*arguments)
        for pack in packs:
            mask = pack.pop("mask")
            pack["labels"] = [label if weight else -100 for label, weight in zip(pack["labels"], mask, strict=True)]
            pack.pop("shards", None)
        return packs

    report = report_on(no_mask, conventions={**packers.CONVENTIONS, "pad_label": "ignore"})
    assert {statuses(report)[name] for name in ("L2", "L3", "L6")} == {PASSED}


def test_what_is_no_list_of_packs_is_reported():
    for returned, said in (
        ({}, "list of packs"),
        ([3], "must be a dict"),
        ([{"input_ids": [1]}], "lacks labels"),
        ([{"input_ids": [1], "labels": [1, 2]}], "1 positions of input_ids, got 2"),
        ([{"input_ids": [1], "labels": [1], "loss": 1}], "unknown fields loss"),
        ([{"input_ids": [1], "labels": [0.5]}], "whole numbers"),
        ([{"input_ids": [1], "labels": [float("nan")]}], "whole numbers"),
        ([{"input_ids": [1], "labels": ["a"]}], "whole numbers"),
        ([{"input_ids": [[1, 2], [3, 4]], "labels": [1]}], "whole numbers"),
        ([{"input_ids": [1], "labels": [1], "mask": []}], "mask must have the 1 positions"),
        ([{"input_ids": [1], "labels": [1], "cu_seqlens": [1]}], "cu_seqlens must begin with 0"),
        ([{"input_ids": [1], "labels": [1], "cu_seqlens": []}], "cu_seqlens must begin with 0"),
        ([{"input_ids": [1], "labels": [1], "shards": 3}], "shards must be a list of dicts"),
        ([{"input_ids": [1], "labels": [1], "shards": [3]}], "each of shards must be a dict"),
    ):
        assert said in judge(CASES[0], returned, MEGATRON_LM, "strict").misses["L1"].what


def test_the_smallest_row_is_printed_whole():
    report = report_on(packers.leak)
    lines = "\n".join(smallest(report.levels[2]))
    assert "conversation 1   tokens" in lines
    assert "row 0  labels" in lines


def test_drawn_cases_depend_on_the_seed_alone():
    assert drawn_cases(5, seed=3) == drawn_cases(9, seed=3)[:5]
    assert drawn_cases(5, seed=3) != drawn_cases(5, seed=4)
    # As Python 3.8 draws it.
    assert [each["tokens"] for each in drawn_cases(1)[0].conversations] == [[90, 99, 37, 29], [40, 75]]


def test_an_unknown_level_is_named():
    assert level_named("l3").name == "L3"
    with pytest.raises(ValueError, match="choose one of L1"):
        level_named("L11")
    assert len(LEVELS) == 10
