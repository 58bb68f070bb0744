"""Every public name of production says what it is for, and shapes, dtypes and errors where it takes tensors or refuses (read, not imported)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "production"
SHAPE = re.compile(r"\[[^\]]+\]|[Ss]calar|[Aa]ny shape|[Oo]ne (value|number)")
DTYPE = re.compile(r"int(8|16|32|64)|u?float(16|32|64)|bool|dtype|as the next|[Ii]ndices")
REFUSAL = re.compile(r"[Rr]aise|[Rr]efuse|BadInput|Error")
RAISED = re.compile(r"(Error|Refused|BadInput|Lost|NotFinite)$")


def modules():
    """Name and syntax tree of each module whose path has no underscore in front."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name, ast.parse(path.read_text())


def is_public(name):
    return not name.startswith("_")


def functions(tree):
    """Public functions and methods: name, node, and the class's docstring where it has one."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and is_public(node.name):
            yield node.name, node, ""
        elif isinstance(node, ast.ClassDef) and is_public(node.name):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and is_public(each.name):
                    yield f"{node.name}.{each.name}", each, ast.get_docstring(node) or ""


def fields(tree):
    """Public annotated fields of public classes: name, annotation, and the docstring under it or under its assignment in __init__."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            assigned = {}
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    assigned = dict(documented(each.body))
            for name, text in documented(node.body):
                annotation = next(
                    ast.unparse(each.annotation)
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name
                )
                yield f"{node.name}.{name}", annotation, text or assigned.get(name, "")


def documented(body) -> Iterator[tuple[str, str]]:
    """Each public name that statements annotate or assign to self, with the string that follows."""
    for at, each in enumerate(body):
        target = each.target if isinstance(each, ast.AnnAssign) else None
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute):
            target = each.targets[0]
        if target is None:
            continue
        name = ast.unparse(target).removeprefix("self.")
        if not is_public(name):
            continue
        after = body[at + 1] if at + 1 < len(body) else None
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        yield name, str(after.value.value) if is_text else ""


def takes_or_gives_tensors(node):
    annotations = [each.annotation for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return any(
        re.search(r"\btorch\.Tensor\b", ast.unparse(each)) for each in [*annotations, node.returns] if each is not None
    )


def raises(node):
    """Whether its own statements raise an error of this package, by name or by a helper that makes one."""
    for each in ast.walk(node):
        if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call):
            name = ast.unparse(each.exc.func)
            if RAISED.search(name) or re.search(r"refus|_unexpected|bad_", name):
                return True
    return False


def faults_of(name, tree):
    """Each thing that a reader would miss in a module, as `module:name: what`."""
    found = []
    if tree.body and not ast.get_docstring(tree):
        found.append(f"{name}: no docstring")
    found += [
        f"{name}:{node.name}: no docstring"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and is_public(node.name) and not ast.get_docstring(node)
    ]
    for called, node, of_class in functions(tree):
        own = ast.get_docstring(node)
        if not own:
            found.append(f"{name}:{called}: no docstring")
            continue
        # A method may leave to its class what all of its methods share.
        said = f"{own}\n{of_class}"
        if takes_or_gives_tensors(node) and not SHAPE.search(said):
            found.append(f"{name}:{called}: takes or gives tensors and names no shape")
        if raises(node) and not REFUSAL.search(said):
            found.append(f"{name}:{called}: raises and does not say so")
    for called, annotation, text in fields(tree):
        if not text:
            found.append(f"{name}:{called}: no docstring under the field")
        elif re.fullmatch(r"torch\.Tensor( \| None)?", annotation):
            if not SHAPE.search(text):
                found.append(f"{name}:{called}: a tensor without a shape")
            if not DTYPE.search(text):
                found.append(f"{name}:{called}: a tensor without a dtype")
    return found


def test_every_public_name_of_production_is_documented():
    trees = dict(modules())
    assert len(trees) > 80
    counted = sum(len(list(functions(tree))) + len(list(fields(tree))) for tree in trees.values())
    assert counted > 500
    found = [fault for name, tree in trees.items() for fault in faults_of(name, tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(x): ...", "m: no docstring"),
        ('"""M."""\ndef f(x): ...', "m:f: no docstring"),
        ('"""M."""\nclass A: ...', "m:A: no docstring"),
        ('"""M."""\nclass A:\n  """A."""\n  def g(self): ...', "m:A.g: no docstring"),
        ('"""M."""\nclass A:\n  """A."""\n  x: int\n  y: int\n  """Y."""', "m:A.x: no docstring under the field"),
        ('"""M."""\nclass A:\n  """A."""\n  x: torch.Tensor\n  """[P]."""', "m:A.x: a tensor without a dtype"),
        ('"""M."""\nclass A:\n  """A."""\n  x: torch.Tensor\n  """int64."""', "m:A.x: a tensor without a shape"),
        ('"""M."""\ndef f(x: torch.Tensor):\n  """F."""', "m:f: takes or gives tensors and names no shape"),
        ('"""M."""\ndef f(x):\n  """F."""\n  raise PackproofError()', "m:f: raises and does not say so"),
    ],
)
def test_missing_api_entries_are_found(text, fault):
    assert faults_of("m", ast.parse(text)) == ([fault, "m:f: no docstring"] if fault == "m: no docstring" else [fault])


def test_the_map_of_the_api_names_what_is_there():
    """docs/api.md: each `module.name` in it stands in the package, and is public."""
    text = (PACKAGE.parent / "docs" / "api.md").read_text()
    trees = dict(modules())
    named = set(re.findall(r"`(production(?:\.\w+)+)`", text))
    assert len(named) > 40
    for each in named:
        module, _, name = each.rpartition(".")
        if each in trees or f"{each}.__init__" in trees:
            continue
        tree = trees.get(module) or trees.get(f"{module}.__init__")
        assert tree is not None, each
        defined = {getattr(node, "name", "") for node in tree.body}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                defined |= {ast.unparse(target) for target in getattr(node, "targets", [getattr(node, "target", None)])}
            if isinstance(node, ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in node.names}
        assert name in defined, each
    assert len(text.splitlines()) <= 80
