"""The documentation site without building it: every page is in the navigation, and every relative link and anchor resolves."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
HOOKS = ast.parse((ROOT / ".ci" / "docs_hooks.py").read_text(encoding="utf-8"))
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "examples/jobs/README.md")
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / page for page in TOP), ROOT / "equivalence/recorded/README.md"]
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def constant(name):
    """The keys of a dict, or of the page paths in it, that the hooks define under this name."""
    (value,) = [
        node.value
        for node in HOOKS.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).split()[0]
    ]
    return {each.value for each in ast.walk(value) if isinstance(each, ast.Constant)}


def in_navigation(entries):
    """Every page of the navigation."""
    for entry in entries:
        for value in entry.values():
            yield from in_navigation(value) if isinstance(value, list) else [value]


@cache
def anchors(path):
    """Anchors of a page: its headings as GitHub and the site write them, and those set by hand."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each).replace("`", "") for each in headings]
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in plain} | set(
        re.findall(r'<a id="([\w-]+)">', text)
    )


def broken_links(page, text):
    """Relative links of a page that lead to no file, and anchors that their page does not have."""
    for target, anchor in LINK.findall(re.sub(r"`[^`\n]*`", "X", FENCE.sub("", text))):
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield f"{target}#{anchor}" if anchor else target


def test_every_page_is_in_the_navigation_once():
    listed = list(in_navigation(CONFIG["nav"]))
    assert len(listed) == len(set(listed))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == written | {"index.md"} | (constant("OUTSIDE") - {"README.md"}) | {
        f"api/{page}.md" for page in constant("API") if page.islower()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_and_anchors_of_a_page_resolve(page):
    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


def test_a_link_or_an_anchor_that_leads_nowhere_is_found():
    page = ROOT / "docs" / "evidence.md"
    text = "[a](SPEC.md#r-pack-5), [b](SPEC.md#r-pack-99), [c](no.md), [d](#no), `[e](no)`, [f](https://example.org/x)"
    assert list(broken_links(page, text)) == ["SPEC.md#r-pack-99", "no.md", "#no"]


def test_the_site_is_strict_and_loads_nothing_from_the_network():
    assert CONFIG["strict"] is True
    assert CONFIG["theme"]["font"] is False
    assert set(CONFIG["validation"].values()) == {"warn"}
    assert "extra_javascript" not in CONFIG
    assert not re.search(r"url\(|@import|https?:", (ROOT / "docs" / "site.css").read_text(encoding="utf-8"))
