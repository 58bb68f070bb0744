"""SPEC and the tests that hold it: every rule of SPEC's pages links its function and a test that names the rule."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8")
    for name in ("SPEC.md", "spec-setup.md", "spec-tokens.md", "spec-records.md")
}
SPEC = "\n".join(PAGES.values())
NOTES = (DOCS / "spec-notes.md").read_text(encoding="utf-8")
EVIDENCE = (DOCS / "evidence.md").read_text(encoding="utf-8")
# A rule's item: anchors, number with the letter of a part, third sides, text; then the line with its two links.
ITEM = re.compile(
    r"^- ((?:<a id=\"[\w-]+\"></a>)+)\*\*(R-[A-Z]+-\d+)([a-z]?)\*\* \*\(([a-z, ]+)\)\* (.+)<br>\n"
    r"  Code: \[`([\w.]+)`\]\(\.\./([\w/]+\.py)\) · Test: \[`(\w+)`\]\(\.\./([\w/]+\.py)\)$",
    re.MULTILINE,
)
ITEMS = ITEM.findall(SPEC)
RULES = list(dict.fromkeys(rule for _, rule, *_ in ITEMS))
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
    assert len(RULES) > 100
    named = set().union(*rules_by_test().values())
    assert [rule for rule in RULES if rule not in named] == []


REFERENCE = re.compile(r"docs/((?:SPEC|spec-[a-z]+)\.md)#([\w-]+)((?:,? (?:and )?#[\w-]+)*)")


def test_code_and_pages_refer_to_headings_and_rules_of_spec_that_are_there():
    """`docs/SPEC.md#row`, or `docs/SPEC.md#row and #report`; section numbers are gone."""
    slugs = {
        page: {
            re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-")
            for each in re.findall(r"^##+ (.+)$", text, re.MULTILINE)
        }
        | set(re.findall(r'id="([\w-]+)"', text))
        for page, text in PAGES.items()
    }
    rooms = ("production", "reference", "equivalence", "tools", "tests", "docs", "examples")
    files = [
        path for room in rooms for kind in ("py", "md", "html", "yaml") for path in (ROOT / room).rglob(f"*.{kind}")
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    count, wrong = 0, []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for page, first, more in REFERENCE.findall(text):
            for anchor in [first, *re.findall(r"#([\w-]+)", more)]:
                count += 1
                if page not in slugs or anchor not in slugs[page]:
                    wrong.append(f"{path.relative_to(ROOT).as_posix()}: {page}#{anchor}")
        if path != Path(__file__):
            wrong += [
                f"{path.relative_to(ROOT).as_posix()}: {each}"
                for each in re.findall(r"SPEC(?:'s)? \(?sections? \d+", text)
            ]
    assert count > 60
    assert wrong == []


def test_no_test_names_a_rule_that_spec_does_not_have():
    wrong = {test: sorted(named - set(RULES)) for test, named in rules_by_test().items()}
    assert {test: rules for test, rules in wrong.items() if rules} == {}


def test_every_rule_is_an_item_with_its_anchor_and_keeps_its_number():
    """A rule in parts has one letter for each part, from a; the first part also has the anchor of the whole rule."""
    assert re.findall(r"\*\*(R-[A-Z]+-\d+[a-z]?)\*\*", SPEC) == [rule + part for _, rule, part, *_ in ITEMS]
    parts = {}
    for anchors, rule, part, *_ in ITEMS:
        first = rule not in parts
        parts.setdefault(rule, []).append(part)
        expected = dict.fromkeys(([rule.lower()] if first else []) + [rule.lower() + part])
        assert re.findall(r"id=\"([\w-]+)\"", anchors) == list(expected), rule + part
    whole = {rule: "".join(each) for rule, each in parts.items()}
    assert {rule: each for rule, each in whole.items() if each != "abcdefgh"[: len(each)]} == {}
    assert len(ITEMS) > 200


@cache
def functions_in(path):
    """Names of the functions and classes of a file, methods as `Class.method`, each with its own text."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    found = {}

    def collect(body, owner):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[owner + node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{owner}{node.name}.")

    collect(ast.parse("\n".join(lines)).body, "")
    return found


def wrong_links(items):
    """What is wrong with the two links of each rule: a function that is not in its file, a test that does not name the rule."""
    tests = rules_by_test()
    for _, rule, part, _, _, function, file, test, test_file in items:
        if function not in functions_in(file):
            yield f"{rule}{part}: {file} has no {function}"
        if rule not in tests.get(f"{test_file}::{test}", ()):
            yield f"{rule}{part}: {test_file} has no {test} that names {rule}"


def test_every_rule_links_a_function_that_exists_and_a_test_that_names_the_rule():
    assert list(wrong_links(ITEMS)) == []


def test_a_rule_of_the_reference_links_the_reference():
    """A rule that a function of `reference/` cites links `reference/`, unless only a part of the rule is elsewhere."""
    cited = set()
    for path in (ROOT / "reference").glob("*.py"):
        cited |= set(re.findall(r"R-[A-Z]+-\d+", path.read_text(encoding="utf-8")))
    linked = {}
    for _, rule, _, _, _, _, file, *_ in ITEMS:
        linked.setdefault(rule, set()).add(file.split("/")[0])
    assert [rule for rule in RULES if rule in cited and "reference" not in linked[rule]] == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({5: "no_such_function"}, "R-SPLIT-1: reference/prompts.py has no no_such_function"),
        (
            {7: "test_row_ends"},
            "R-SPLIT-1: tests/reference/test_reference_rows.py has no test_row_ends that names R-SPLIT-1",
        ),
        (
            {1: "R-SPLIT-9"},
            "R-SPLIT-9: tests/reference/test_reference_rows.py has no test_r_split_1_only_the_exact_role_splits that names R-SPLIT-9",
        ),
    ],
)
def test_a_link_that_leads_nowhere_is_found(changed, complaint):
    item = [changed.get(at, each) for at, each in enumerate(ITEMS[0])]
    assert list(wrong_links([item])) == [complaint]


def test_a_rule_is_short_and_its_reasons_stand_in_the_notes():
    """A rule has at most three sentences outside its formulas; the notes refer only to rules that are there, in the pages' order."""
    sentences = {
        rule + part: len(re.findall(r"[.!?](?=\s+[A-Z`*]|$)", re.sub(r"`[^`]*`|\([^)]*\)", "X", text)))
        for _, rule, part, _, text, *_ in ITEMS
    }
    assert {rule: count for rule, count in sentences.items() if not 1 <= count <= 3} == {}
    noted = re.findall(r"^- \[(R-[A-Z]+-\d+)\]\(([\w-]+\.md)#(r-[\w-]+)\): ", NOTES, re.MULTILINE)
    assert len(noted) > 30
    assert [rule for rule, page, anchor in noted if anchor != rule.lower() or f'id="{anchor}"' not in PAGES[page]] == []


def test_the_pages_follow_the_data():
    headings = re.findall(r"^## (.+)$", PAGES["SPEC.md"], re.MULTILINE)
    way = ["Input", "Prompts", "Row", "Batch", "Microbatch", "Context parallelism", "Multi-token prediction", "Loss"]
    way += ["Model", "Training step", "Online path", "Order", "Files", "Presets"]
    assert headings == ["Contents", "How to read a rule", "Tensors", *way]
    for page, text in PAGES.items():
        contents = text.split("## Contents")[1].split("\n## ")[0]
        listed = re.findall(r"^\s*- \[(.+)\]\(#", contents, re.MULTILINE)
        assert listed == [each for each in re.findall(r"^##+ (.+)$", text, re.MULTILINE) if each != "Contents"], page


def test_every_rule_says_its_third_side_alike_in_spec_and_in_the_table_of_evidence():
    """The table has one line for each number; the line names the third sides of all parts of the rule."""
    parts = {}
    for _, rule, _, kinds, *_ in ITEMS:
        parts.setdefault(rule, set()).update(kinds.split(", "))
    marked = {rule: [kind for kind in THIRD_SIDES if kind in kinds] for rule, kinds in parts.items()}
    marked = {rule: [kind for kind in kinds if kind != "none"] or ["none"] for rule, kinds in marked.items()}
    assert set().union(*parts.values()) <= set(THIRD_SIDES)
    listed = re.findall(r"^\| (R-[A-Z]+-\d+) \| ([a-z, ]+) \| (.+) \|$", EVIDENCE, re.MULTILINE)
    assert [rule for rule, _, _ in listed] == RULES
    assert {rule: kinds.split(", ") for rule, kinds, _ in listed} == marked
    kinds = [kind for each in marked.values() for kind in each]
    counted = re.search(r"Of (\d+) rules, (.+) \(a rule can have several\), and (\d+) have none", EVIDENCE)
    told = {kind: int(number) for number, kind in re.findall(r"(\d+) have one that is (\w+)", counted[2])}
    assert (int(counted[1]), int(counted[3])) == (len(RULES), kinds.count("none"))
    assert told == {kind: kinds.count(kind) for kind in THIRD_SIDES[:-1]}
