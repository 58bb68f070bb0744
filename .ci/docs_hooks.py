"""Hooks of the documentation site: pages from outside docs/, pages of the API, pages of linked source files, links to rules.

The pages in the repository stay plain Markdown whose relative links work in a checkout. The hooks translate the links: a link
that leaves docs/ leads to a page of the site that shows the file.
"""

import ast
import posixpath
import re
from functools import cache
from html import escape, unescape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    **{
        path: path
        for path in (
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "examples/README.md",
            "examples/jobs/README.md",
            "equivalence/recorded/README.md",
        )
    },
}
"""Pages outside docs/, by their path in the repository, and their places in the site."""
API = {
    "files": "Files",
    "rows": "Rows",
    "online": "Online path",
    "parallel": "Ranks",
    "core": "Loss, errors and semantics",
    "model": "Model",
    "adapters": "Adapters",
    "training": "Training job",
}
"""Pages of the API; each page documents the modules that docs/api.md names from one package."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[\w-]+)?(?=\))")
CODE = re.compile(
    r"(^(?:```|~~~).*?^(?:```|~~~)$|`[^`\n]+`|\[[^\]\n]*\]\([^)\n]*\)|<[^>\n]+>|^#[^\n]*$|\*\*R-[^*]+\*\*)",
    re.MULTILINE | re.DOTALL,
)
RULE = re.compile(r"\bR-[A-Z]+-\d+[a-z]?\b")
SPEC_PLACE = re.compile(r"docs/(SPEC|spec-[a-z]+)\.md(#[\w-]+)?")
NAME = re.compile(r"`(production(?:\.\w+)+)`")


@cache
def rules() -> dict[str, str]:
    """Page and anchor of each rule."""
    found = {}
    for page in ("SPEC.md", "spec-setup.md", "spec-tokens.md", "spec-records.md"):
        for anchor in re.findall(r'<a id="(r-[\w-]+)"></a>', (ROOT / "docs" / page).read_text(encoding="utf-8")):
            found[anchor] = page
    return found


@cache
def api_modules() -> dict[str, list[str]]:
    """Modules that docs/api.md names, by the page of the API that documents them."""
    pages: dict[str, list[str]] = {page: [] for page in API}
    for dotted in NAME.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8")):
        module = module_of(dotted)
        package = module.split(".")[1]
        modules = pages[package if package in pages else "core"]
        if module not in modules:
            modules.append(module)
    return pages


def module_of(dotted: str) -> str:
    """Return the longest part of a dotted name that is a module or a package."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:length])
    raise LookupError(f"docs/api.md names {dotted}, which no module of production defines")


def place_of(path: str) -> str | None:
    """Return the page of the site for a path of the repository; None where a path is neither a page nor a text file."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if (ROOT / path).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the pages of the API and the source files that a page links."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files if file.src_uri.endswith(".md")}
    texts |= {path: (ROOT / path).read_text(encoding="utf-8") for path in OUTSIDE}
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=texts[path]))
    for page, title in API.items():
        blocks = "\n\n".join(
            f"::: {module}\n    options: {{show_root_full_path: true}}" for module in api_modules()[page]
        )
        files.append(File.generated(config, f"api/{page}.md", content=f"# {title}\n\n{blocks}\n"))
    linked = set()
    for path, text in texts.items():
        for target, _ in LINK.findall(text):
            linked.add(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
    for path in sorted(linked):
        place = place_of(path)
        if place and place.startswith("source/"):
            text = (ROOT / path).read_text(encoding="utf-8")
            language = LANGUAGES.get(Path(path).suffix, "text")
            content = f'---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n~~~~~~{{.{language} linenums="1"}}\n{text}\n~~~~~~\n'
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate links out of docs/, and link each mentioned rule and each name of the API."""
    here = page.file.src_uri
    if here.startswith(("source/", "api/")):
        return markdown
    origin = next((path for path, place in OUTSIDE.items() if place == here), f"docs/{here}")

    def translated(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        place = place_of(target)
        return (
            match[0] if place is None else posixpath.relpath(place, posixpath.dirname(here) or ".") + (match[2] or "")
        )

    def linked_rules(text: str) -> str:
        return RULE.sub(
            lambda rule: (
                f"[{rule[0]}]({posixpath.relpath(rules()[rule[0].lower()], posixpath.dirname(here) or '.')}#{rule[0].lower()})"
                if rule[0].lower() in rules()
                else rule[0]
            ),
            text,
        )

    text = LINK.sub(translated, markdown)
    if here == "api.md":
        return NAME.sub(lambda name: f"[`{name[1].removeprefix('production.')}`][{name[1]}]", text)
    return "".join(part if at % 2 else linked_rules(part) for at, part in enumerate(CODE.split(text)))


@cache
def lines_of(path: str) -> dict[str, int]:
    """Line of each function and class of a Python file; a method is `Class.method`."""
    found: dict[str, int] = {}

    def collect(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[owner + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{owner}{node.name}.")

    collect(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return found


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead a link to a function to its line of the source page."""

    def with_line(match: re.Match[str]) -> str:
        line = lines_of(match[2]).get(unescape(match[3]))
        return (
            f'<a href="{match[1]}#__codelineno-0-{line}"><code>{escape(unescape(match[3]))}</code>'
            if line
            else match[0]
        )

    if page.file.src_uri.startswith("api/"):
        html = SPEC_PLACE.sub(lambda match: f'<a href="../{match[1]}.html{match[2] or ""}">{match[0]}</a>', html)
        html = RULE.sub(
            lambda rule: (
                f'<a href="../{rules()[rule[0].lower()].removesuffix(".md")}.html#{rule[0].lower()}">{rule[0]}</a>'
                if rule[0].lower() in rules()
                else rule[0]
            ),
            html,
        )
    return re.sub(r'<a href="((?:\.\./)*source/([\w./-]+\.py)\.html)"><code>([^<]+)</code>', with_line, html)
