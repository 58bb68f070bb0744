"""The pages of docs: the map names every module, and no page names a module, a file or a name that is not there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("production", "reference", "equivalence", "tools")
MAP = ROOT / "docs" / "architecture.md"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
# `production/rows/builder.py`, `equivalence/recorded/`, as the target of a link or in text.
PATH = re.compile(rf"(?<![\w./-])(?:\.\./)*((?:{'|'.join(PACKAGES)}|tests|examples|docs)/[\w./-]*)")
DOTTED = re.compile(rf"(?<![\w./:-])((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")


def modules():
    """The path of each module of the four packages, without those that only make a folder a package."""
    found = [path.relative_to(ROOT).as_posix() for each in PACKAGES for path in (ROOT / each).rglob("*.py")]
    return {path for path in found if not path.endswith("__init__.py")}


@cache
def defined_in(module):
    """The public names of a module or package, read and not imported; None where there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target) for target in targets}
    return names


def is_there(dotted):
    """Whether a dotted name is a module, or a name in one; what follows a class's name is not looked at."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        names = defined_in(".".join(parts[:length]))
        if names is not None:
            return length == len(parts) or parts[length] in names
    return False


def missing_paths(text):
    """Each path of this repository in a text that leads nowhere."""
    named = {match.rstrip(".") for match in PATH.findall(text)}
    return sorted(path for path in named if not (ROOT / path).exists())


def test_the_map_names_every_module():
    named = set(re.findall(r"`([\w/]+\.py)`", MAP.read_text(encoding="utf-8")))
    assert len(modules()) > 250
    assert sorted(modules() - named) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_only_paths_and_names_that_are_there(page):
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    assert [name for name in sorted(set(DOTTED.findall(text))) if not is_there(name)] == []


def test_a_path_or_a_name_that_is_not_there_is_found():
    assert missing_paths("see `production/rows/builder.py`, [it](../equivalence/no_such.py).") == [
        "equivalence/no_such.py"
    ]
    assert is_there("production.rows.builder.RowBuilder.build")
    assert is_there("production.rows")
    assert not is_there("production.rows.builder.NoSuchName")
    assert not is_there("production.no_such_module")


def test_a_bare_file_name_in_how_it_works_stands_in_the_folder_named_before_it():
    folder, count = None, 0
    for token in re.findall(r"[\w/]+\.py", (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")):
        if "/" in token:
            folder = (ROOT / token).parent
        else:
            count += 1
            assert (folder / token).exists(), f"{folder}/{token}"
    assert count > 10


def test_the_pages_of_the_house_name_only_what_stands_in_the_code():
    files = [path for each in (*PACKAGES, "tests") for path in (ROOT / each).rglob("*.py")]
    known = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in files)))
    for page in ("CONTRIBUTING.md", "docs/architecture.md", "docs/how-it-works.md", "docs/glossary.md"):
        spans = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", (ROOT / page).read_text(encoding="utf-8"))
        names = {part for span in spans if "_" in span for part in span.split(".")}
        assert sorted(names - known) == [], page


def test_every_package_says_its_purpose():
    packages = [path for each in PACKAGES for path in (ROOT / each).rglob("__init__.py")]
    assert len(packages) > 40
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_the_glossary_gives_each_word_one_meaning_in_one_sentence():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    entries = [(word, meaning) for word, meaning, _ in rows if word != "word"]
    words = [word for word, _ in entries]
    assert len(set(words)) == len(words) > 50
    assert [word for word, meaning in entries if not re.fullmatch(r"[A-Z][^.]*(?:`[^`]*`[^.]*)*\.", meaning)] == []


def test_evidence_names_functions_that_production_has():
    """The names of "Functions that each check drives" begin below `production`."""
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    driven = text.split("## Functions that each check drives")[1].split("\n## ")[0]
    rooms = {path.stem for path in (ROOT / "production").iterdir()}
    names = [name for name in re.findall(r"`(\w+\.[\w.]+)`", driven) if name.split(".")[0] in rooms]
    assert len(names) > 30
    assert [name for name in names if not is_there(f"production.{name}")] == []


ROOMS = (
    "reference",
    *sorted({path.parent.relative_to(ROOT).as_posix() for each in PACKAGES for path in ROOT.glob(f"{each}/*/*.py")}),
)
ALONE = sorted(path for package in PACKAGES for path in (ROOT / package).glob("*.py"))
"""Modules beside the rooms of their packages, such as production/loss.py."""
HEADLINE = re.compile(r"\A(What|How|Which|Where|Whether|Whose|Why)\b")
# A function says what it does. A property, and the rest, may name its value.
NO_VERB = re.compile(r"\A(The|A|An|What|How|Which|Where|Whether|Whose|Why|Of|Those|That|Its)\b")
# Words and turns that the glossary or plain English replaces, in docstrings, error texts and pages.
REPLACED = {
    r"how manieth": "the number of",
    r"\bmend(s|ed|ing)? it\b": "fix it",
    r"\bto mend\b": "to fix",
    r"that is none\b": "that is not one",
    r"of it (is|are) none": "none of them",
    r"(?<!there )\bis no (size|number|name|choice|multiple|mapping|case|field|JSON|row|rank|index|list)\b": "must be …, got …",
    r"\bare no (multiple|number|rows|numbers)\b": "must be …, got …",
    r"(?<!there )\bis no (folder|file|kind|key|share|duration|metric|YAML|regular file)\b": "must be …, got …",
    r"\bwhere .{1,30} is wanted\b": "must be …, got …",
    r"\bis too (small|large)\b": "must be at least …, got …, or must be at most …, got …",
    r"\b(is|are) (not done|done) here\b": "must be …, got …",
    r"\b(is|was) not (as|what) it was\b": "was changed, or name the difference",
    r"\bhas no place for\b": "does not have",
    r"\bis said of\b": "name the thing",
    r"\bwhat is made of\b": "name the result",
}
# `rank_stats.Group`, in a docstring: the first part is a module that the package has, or one of these.
SHORT = re.compile(r"`([a-z_]+)\.(?!(?:jsonl|json|svg|yaml|py)`)([A-Za-z_]+)(?:\(\))?`")
# Sections of a job, then names of libraries, then attributes and packages.
NOT_MODULES = {"checkpointing", "cluster", "data", "logger", "loss", "policy", "sft", "model"}
NOT_MODULES |= {"megatron", "multi_token_prediction", "os", "pg_collection", "self_attention", "tokenizers", "torch"}
NOT_MODULES |= {
    "report",
    "worker",
    "findings",
    "dumped",
    "rich",
    "reference",
    "production",
}  # values, libraries, backends
NOT_MODULES |= {"packproof", "tables", "device", "subjects", "generators", *PACKAGES}


def docstrings(room):
    """File, owner and text of each docstring below a folder; the strings under fields have no owner."""
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            body = getattr(node, "body", None)
            for at, each in enumerate(body if isinstance(body, list) else []):
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    yield path.relative_to(ROOT).as_posix(), node if at == 0 else None, str(each.value.value)


@cache
def modules_by_stem(package):
    """The dotted names of a package's modules, by the last part."""
    stems = {}
    for path in modules():
        if path.startswith(f"{package}/"):
            stems.setdefault(Path(path).stem, []).append(path.removesuffix(".py").replace("/", "."))
    return stems


def absent_names(package, text):
    """Each path or dotted name of ours in a docstring that is not there; a short name is looked for in its package."""
    absent = [*missing_paths(text), *(name for name in DOTTED.findall(text) if not is_there(name))]
    for module, name in SHORT.findall(text):
        places = modules_by_stem(package).get(module, [])
        if module not in NOT_MODULES and not any(name in defined_in(each) for each in places):
            absent.append(f"{module}.{name}")
    return absent


def is_headline(owner, text):
    """A docstring of a module, class or function that is a noun clause; or of a function that names no action."""
    if owner is None or HEADLINE.match(text):
        return owner is not None
    if not isinstance(owner, ast.FunctionDef):
        return False
    decorators = {ast.unparse(each).split(".")[-1] for each in owner.decorator_list}
    is_value = any("property" in each for each in decorators) or "contextmanager" in decorators
    return not is_value and NO_VERB.match(text) is not None


RIDDLE = re.compile(r"_(is|are)_(told|said)(_|$)|_tells_of_|_that_is_none(_|$)|_of_ours(_|$)|_how_the_|_anew(_|$)")
"""Words in the name of a test that do not say in plain words what must hold."""


def test_the_name_of_a_test_or_its_docstring_says_what_must_hold():
    riddles = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
        if RIDDLE.search(node.name)
    ]
    assert riddles == []
    assert RIDDLE.search("test_a_missing_row_is_" + "told")
    assert not RIDDLE.search("test_a_wrong_order_is_reported")


@pytest.mark.parametrize("room", [*ROOMS, "subject", *PACKAGES])
def test_a_docstring_says_what_is_done_and_names_only_what_is_there(room):
    """A room with its folders; a package by its own modules beside the rooms."""
    alone = {path.relative_to(ROOT).as_posix() for path in ALONE} if room in PACKAGES else None
    texts = [each for each in docstrings(room) if alone is None or each[0] in alone]
    assert texts
    assert [f"{file}: {text}" for file, owner, text in texts if is_headline(owner, text)] == []
    absent = [(file, name) for file, _, text in texts for name in absent_names(room.split("/")[0], text)]
    assert absent == []


def texts_of(path):
    """Line and text of each string of a module, docstrings and error texts alike; of a page, each line outside code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value
    else:
        yield from enumerate(re.sub(r"`[^`\n]*`", "X", text).splitlines(), start=1)


def replaced_words(path):
    """Each place of a file that still has a word or a turn of REPLACED."""
    for line, text in texts_of(path):
        for pattern, better in REPLACED.items():
            if found := re.search(pattern, text):
                yield f"{path.relative_to(ROOT).as_posix()}:{line}: {found[0]!r}; write {better!r}"


def test_no_text_has_a_word_that_the_glossary_replaces():
    files = [path for package in (*PACKAGES, "subject") for path in (ROOT / package).rglob("*.py")]
    files += [page for page in PAGES if page.name != "CHANGELOG.md"]
    assert [place for path in sorted(files) for place in replaced_words(path)] == []


def test_an_old_turn_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(replaced_words.__globals__, "ROOT", tmp_path)
    module = tmp_path / "module.py"
    module.write_text(
        '"""Which of them it is, and the how manieth."""\nraise ValueError("0 is no size; see how to mend it")\n'
        'raise ValueError("x is no folder")\nraise ValueError("1 where a path is wanted")\nraise ValueError("0 is too small")\n'
        'raise ValueError("only thd is done here")\nraise ValueError("a.bin is not as it was")\nraise ValueError("it has no place for b")\n'
    )
    assert [place.split(";")[0] for place in replaced_words(module)] == [
        "module.py:1: 'how manieth'",
        "module.py:2: 'mend it'",
        "module.py:2: 'to mend'",
        "module.py:2: 'is no size'",
        "module.py:3: 'is no folder'",
        "module.py:4: 'where a path is wanted'",
        "module.py:5: 'is too small'",
        "module.py:6: 'is done here'",
        "module.py:7: 'is not as it was'",
        "module.py:8: 'has no place for'",
    ]


def test_a_headline_that_is_a_noun_clause_and_a_short_name_that_is_not_there_are_found():
    module, function, value = ast.Module(), *ast.parse("def f(): ...\n@property\ndef g(self): ...").body
    assert is_headline(module, "What a rank holds.")
    assert is_headline(function, "The tokens of a rank.")
    assert not is_headline(value, "The tokens of a rank.")
    assert is_headline(value, "Whether a rank holds tokens.")
    assert not is_headline(function, "Return what a rank holds.")
    assert not is_headline(None, "What a rank holds.")
    assert absent_names("production", "as `padded_batch.fill_bins`, `sft.seed` and `padded_batch.no_such`") == [
        "padded_batch.no_such"
    ]
