"""How the packages import each other: no import inside a function hides a cycle between two modules."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("production", "equivalence", "tools", "reference")


def modules_below(root):
    """Return the file of every module of our packages below `root`, by its dotted name."""
    files = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(node, modules):
    """Return the modules of ours that one import statement loads; the packages around a module are loaded by whoever loads it."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert not node.level, "relative imports are not used here, and this test does not resolve them"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules else node.module for name in names]
    return {name for name in names if name in modules}


def imports_of(path, modules):
    """Return (imported at the top, [(line, imported inside a function)]) of one module. What only a type checker reads is neither."""
    at_top, deferred = set(), []

    def visit(node, *, inside):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = imported(node, modules)
            if inside:
                deferred.extend((node.lineno, name) for name in sorted(found))
            else:
                at_top.update(found)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, inside=within)

    visit(ast.parse(path.read_text(encoding="utf-8")), inside=False)
    return at_top, deferred


def hidden_cycles(root):
    """Return a line for each import inside a function of a module that, at its top, leads back to the importing one."""
    modules = modules_below(root)
    found = {name: imports_of(path, modules) for name, path in modules.items()}

    @functools.cache
    def reached(name):
        seen, todo = set(), [name]
        while todo:
            new = found[todo.pop()][0] - seen
            seen |= new
            todo.extend(new)
        return seen

    return [
        f"{name}:{line} imports {target} inside a function, and {target} imports {name} at its top, directly or through "
        f"others: move what both need into a module of its own"
        for name, (_, deferred) in sorted(found.items())
        for line, target in deferred
        if target == name or name in reached(target)
    ]


def test_no_import_inside_a_function_hides_a_cycle():
    assert hidden_cycles(ROOT) == []


def test_a_hidden_cycle_is_found_also_through_a_third_module(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "tools" / "a.py").write_text("import json\n\ndef f():\n    from tools import c\n    import torch\n")
    (tmp_path / "tools" / "b.py").write_text("from tools.a import f\n")
    (tmp_path / "tools" / "c.py").write_text("import tools.b\n\ndef g():\n    from production import d\n")
    (tmp_path / "production" / "d.py").write_text("VALUE = 1\n")
    (found,) = hidden_cycles(tmp_path)
    assert found.startswith("tools.a:4 imports tools.c")


FIRST_LOOK = (
    "equivalence.__main__",
    "equivalence.runner.first_look",
    "equivalence.runner.recorded_jobs",
    "equivalence.subjects.reference",
    "equivalence.subjects.production",
)
"""What a run has imported when it takes its first look, which is told while megatron-core is still being imported."""


def test_a_first_look_imports_no_megatron_core_which_takes_longer_than_the_look():
    modules = modules_below(ROOT)
    todo, reached = list(FIRST_LOOK), {}
    while todo:
        name = todo.pop()
        path = modules[name]
        around = {name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)} & modules.keys()
        for other in (imports_of(path, modules)[0] | around) - reached.keys():
            reached[other] = name
            todo.append(other)
    heavy = [
        f"{name}, imported by {reached.get(name, 'the run')}"
        for name in {*FIRST_LOOK, *reached}
        for node in ast.parse(modules[name].read_text(encoding="utf-8")).body
        if (
            isinstance(node, ast.Import | ast.ImportFrom)
            and "megatron" in ast.unparse(node).split("import")[0].split(".")[0]
        )
        or (isinstance(node, ast.Import) and any(alias.name.startswith("megatron") for alias in node.names))
    ]
    assert len(reached) > 60, "the walk reaches what rows are built of"
    assert heavy == []
