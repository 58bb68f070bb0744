"""Make, list and remove witnesses: folders with another version's packages, which a process of its own imports first."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from equivalence.cache import cache_root
from equivalence.errors import InputError

PREFIX = "megatron_lm@"
"""Begins the name of a subject that is a witness; the rest is its version."""
PACKAGES, _RECORD = "packages", "witness.json"
_REQUIREMENT = re.compile(r"megatron-core==(?P<version>\d+\.\d+\.\d+(?:[a-z]+\d+)?)")
_WITH_TRANSFORMERS_4 = ("0.15.", "0.16.", "0.17.")
"""Versions whose tokenizer imports names that transformers 5 does not have."""
_DATASET = Path("megatron/training/datasets/sft_dataset.py")


@dataclass(frozen=True, kw_only=True)
class VersionWitness:
    """One other version of Megatron-LM."""

    version: str
    """What stands behind `megatron_lm@`."""
    made_of: str
    """Requirement that was installed, or the checkout."""
    root: str
    """Folder that is imported first: the packages, or the checkout."""
    own_transformers: bool
    """Whether it has a transformers of its own, since it cannot use the shared one."""

    @property
    def command(self) -> str:
        """Return the command line that serves the witness."""
        return shlex.join([sys.executable, "-m", "equivalence.witnesses.serve", self.version, self.root])


def folder() -> Path:
    """Return the folder of all witnesses."""
    return cache_root() / "witnesses"


def find(version: str) -> VersionWitness:
    """Return a witness by version. InputError names those that there are."""
    for witness in witnesses():
        if witness.version == version:
            return witness
    known = ", ".join(each.version for each in witnesses()) or "none"
    raise InputError(
        f"there is no witness {PREFIX}{version} (there: {known}); make it: packproof witness add megatron-core=={version}"
    )


def witnesses() -> list[VersionWitness]:
    """Return all witnesses, by version. InputError for a damaged record."""
    return [_read(path) for path in sorted(folder().glob(f"*/{_RECORD}"))]


def _read(path: Path) -> VersionWitness:
    try:
        return VersionWitness(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} is no record of a witness ({error}): delete {path.parent}, and add it again"
        ) from error


def add(requirement: str, *, source: Path | None = None) -> VersionWitness:
    """Make a witness of a released version, or of a checkout (then `requirement` is the name it gets).

    Only the wheel is installed: its dependencies are those of packproof's own environment. A version that needs transformers 4
    gets a transformers of its own.
    InputError for a version that is there, that cannot be installed, or that has no SFT dataset.
    """
    if source is not None:
        return _add_source(requirement, source.resolve())
    matched = _REQUIREMENT.fullmatch(requirement)
    if matched is None:
        raise InputError(
            f"the requirement must name a version, got {requirement!r}: write megatron-core==0.18.2, or NAME --source DIR"
        )
    version = matched["version"]
    _check_free(version)
    folder().mkdir(parents=True, exist_ok=True)
    is_old = version.startswith(_WITH_TRANSFORMERS_4)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        packages = Path(scratch) / "whole" / PACKAGES
        _install(packages, "--no-deps", requirement)
        if not (packages / _DATASET).is_file():
            raise InputError(f"{requirement} ships no {_DATASET}: give a checkout of that version by --source DIR")
        if is_old:
            _install(packages, "transformers>=4.57,<5")
        place = folder() / version
        made = VersionWitness(version=version, made_of=requirement, root=str(place / PACKAGES), own_transformers=is_old)
        _write(packages.parent, made)
        packages.parent.rename(place)
    return made


def remove(version: str) -> None:
    """Remove a witness; a checkout itself stays. InputError where there is none."""
    find(version)
    shutil.rmtree(folder() / version)


def _add_source(name: str, source: Path) -> VersionWitness:
    if not re.fullmatch(r"[\w.\-]+", name):
        raise InputError(f"a name must be of letters, digits, dots and dashes, got {name!r}")
    if not (source / _DATASET).is_file():
        raise InputError(f"{source} has no {_DATASET}: give the root of a Megatron-LM checkout that trains SFT")
    _check_free(name)
    made = VersionWitness(version=name, made_of=str(source), root=str(source), own_transformers=False)
    (folder() / name).mkdir(parents=True)
    _write(folder() / name, made)
    return made


def _check_free(version: str) -> None:
    if (folder() / version).exists():
        raise InputError(
            f"the witness {PREFIX}{version} exists already; remove it first: packproof witness remove {version}"
        )


def _write(place: Path, witness: VersionWitness) -> None:
    (place / _RECORD).write_text(json.dumps(asdict(witness), indent=2), encoding="utf-8")


def _install(target: Path, *words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(target),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this Python, and words that `add` checked
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise InputError(f"{' '.join(words)} cannot be installed: {last}")
