"""SPEC and the tests that hold it: every rule of docs/SPEC.md is named by a test."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPEC = (ROOT / "docs" / "SPEC.md").read_text(encoding="utf-8")
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
RULES = re.findall(r"^- \*\*(R-[A-Z]+-\d+)\*\*", SPEC, re.MULTILINE)
THIRD_SIDES = ("installed", "recorded", "published", "tried", "none")
# A test's name carries `r_cp_1`, `r_cp_3_and_4`, `r_train_1_to_3`; its docstring `R-CP-1`, `R-CP-3 and 4`, `R-TRAIN-1 to 3`.
RULE = re.compile(r"\br[-_]([a-z]+)[-_](\d+)((?:[-_ ,](?:and[-_ ]|to[-_ ])?\d+\b)*)", re.IGNORECASE)
MORE = re.compile(r"(to[-_ ])?(\d+)", re.IGNORECASE)


def named_in(text):
    """Every rule that the name or docstring of a test names."""
    named = set()
    for section, first, more in RULE.findall(text.replace("test_r_", "r_").replace("_r_", " r_").replace("_", "-")):
        numbers = [int(first)]
        for upto, number in MORE.findall(more):
            numbers += range(numbers[-1] + 1, int(number) + 1) if upto else [int(number)]
        named |= {f"R-{section.upper()}-{number}" for number in numbers}
    return named


def rules_by_test():
    """Every test function of the suite, and the rules that its name or docstring names."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                where = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found[where] = named_in(f"{node.name} {ast.get_docstring(node) or ''}")
    return found


def test_a_rule_is_read_from_names_and_docstrings_of_tests():
    assert named_in("test_r_cp_3_and_4_what_cannot_be_cut") == {"R-CP-3", "R-CP-4"}
    assert named_in("test_r_train_1_to_3_rates") == {"R-TRAIN-1", "R-TRAIN-2", "R-TRAIN-3"}
    assert named_in("test_r_cp_1_equals_the_formula_and_r_cp_5_is_owned_once") == {"R-CP-1", "R-CP-5"}
    assert named_in("Hold R-LOSS-8, R-MEET-2 and 3 to it.") == {"R-LOSS-8", "R-MEET-2", "R-MEET-3"}
    assert named_in("test_r_pack_published_examples") == set()


def test_every_rule_of_spec_is_named_by_a_test():
    assert len(RULES) == len(set(RULES)) > 100
    named = set().union(*rules_by_test().values())
    assert [rule for rule in RULES if rule not in named] == []


def test_no_test_names_a_rule_that_spec_does_not_have():
    wrong = {test: sorted(named - set(RULES)) for test, named in rules_by_test().items()}
    assert {test: rules for test, rules in wrong.items() if rules} == {}


def test_every_rule_says_its_third_side_alike_in_spec_and_in_the_table_of_evidence():
    marked = dict(re.findall(r"^- \*\*(R-[A-Z]+-\d+)\*\* \*\(([a-z, ]+)\)\*", SPEC, re.MULTILINE))
    listed = re.findall(r"^\| (R-[A-Z]+-\d+) \| ([a-z, ]+) \| (.+) \|$", EVIDENCE, re.MULTILINE)
    assert [rule for rule, _, _ in listed] == RULES == list(marked)
    assert {rule: kinds for rule, kinds, _ in listed} == marked
    kinds = [kind for kinds in marked.values() for kind in kinds.split(", ")]
    assert set(kinds) <= set(THIRD_SIDES)
    counted = re.search(r"Of (\d+) rules, (.+) \(a rule can have several\), and (\d+) have none", EVIDENCE)
    told = {kind: int(number) for number, kind in re.findall(r"(\d+) have one that is (\w+)", counted[2])}
    assert (int(counted[1]), int(counted[3])) == (len(RULES), kinds.count("none"))
    assert told == {kind: kinds.count(kind) for kind in THIRD_SIDES[:-1]}
