"""Check that a folder is a source tree of Megatron-LM whose driver fits the installed package."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

from equivalence.errors import InputError

SCRIPT = "pretrain_gpt.py"
NEIGHBOURS = (SCRIPT, "gpt_builders.py", "model_provider.py")
"""Files of the tree that are used: the driver, and what it imports beside itself."""
_PACKAGE = Path("megatron/core/package_info.py")


def check_source(source: Path) -> str:
    """Return the version of megatron-core in the tree, such as `0.19.1`.

    Raises InputError for a folder without the driver, and for a tree of another minor version than the installed megatron-core:
    the script runs on the installed package, and two versions cannot be mixed.
    """
    missing = [name for name in NEIGHBOURS if not (source / name).is_file()]
    if missing:
        raise InputError(
            f"--megatron-source {source} must be a source tree of Megatron-LM, got a folder without {', '.join(missing)}: clone the "
            "branch of the installed megatron-core's version"
        )
    found, installed = _version_of(source), version("megatron-core")
    if found.split(".")[:2] != installed.split(".")[:2]:
        minor = ".".join(installed.split(".")[:2])
        raise InputError(
            f"--megatron-source {source} must have the version of the installed megatron-core {installed}, got {found}: check out "
            f"the branch core_r{minor}.0"
        )
    return found


def _version_of(source: Path) -> str:
    try:
        body = ast.parse((source / _PACKAGE).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise InputError(
            f"--megatron-source {source} must hold {_PACKAGE}, which says the tree's version: {error}"
        ) from None
    numbers = {
        each.targets[0].id: each.value.value
        for each in body
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and isinstance(each.value, ast.Constant)
    }
    if not {"MAJOR", "MINOR", "PATCH"} <= numbers.keys():
        raise InputError(f"--megatron-source {source}: {_PACKAGE} must set MAJOR, MINOR and PATCH")
    return ".".join(str(numbers[name]) for name in ("MAJOR", "MINOR", "PATCH"))
