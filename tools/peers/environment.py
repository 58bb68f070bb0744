"""Builds the environment of a peer: its own packages first, torch and the others from a shared environment behind them.

torch is some gigabytes, so that peers of one Python share it. A peer's own pins come first on its path.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "examples" / "adapters"
MANIFEST = ADAPTERS / "peers.toml"


class UnavailableError(Exception):
    """A peer cannot be installed here: no fitting Python, or pip failed. That says nothing about the peer."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One project whose packing is measured."""

    name: str
    """The name of its table in peers.toml, and of its folder."""
    title: str
    """Project, version, and what makes the row."""
    adapter: str = ""
    """The script in examples/adapters; empty for a side of the suite."""
    subject: str = ""
    """A side of the suite, instead of an adapter."""
    pythons: list[str] = field(default_factory=lambda: ["3.13", "3.12"])
    """Versions of Python that the peer can run under, the preferred first."""
    packages: list[str] = field(default_factory=list)
    """What pip installs, without dependencies."""
    stand_ins: str = "none"
    """What stands in for packages that cannot be had on a CPU."""


def read_peers(path: Path = MANIFEST) -> tuple[list[Peer], list[str]]:
    """Return the peers of the manifest and the packages of a shared environment. TypeError names an unknown key."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Peer(name=name, **entry) for name, entry in found["peers"].items()], found["shared"]["packages"]


def build(peer: Peer, folder: Path, shared: list[str]) -> Path:
    """Return the Python of a peer's environment below `folder`; what is there already is kept. Raises UnavailableError."""
    version, base = _base(peer, folder, shared)
    home = folder / peer.name
    stamp = home / f".installed-{_digest([version, str(base), *peer.packages])}"
    python = home / "bin" / "python"
    if stamp.is_file():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run([str(_interpreter(version)), "-m", "venv", "--without-pip", str(home)])
    # Read after the peer's own packages: the adapters' side of the protocol, and what peers share.
    (home / "lib" / f"python{version}" / "site-packages" / "zz-shared.pth").write_text(f"{ROOT / 'subject'}\n{base}\n")
    _install(python, ["--no-deps", *peer.packages] if peer.packages else [])
    stamp.touch()
    return python


def _base(peer: Peer, folder: Path, shared: list[str]) -> tuple[str, Path]:
    """Return the Python version of a peer and the folder of shared packages: packproof's own, where its Python fits."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own in peer.pythons:
        return own, Path(sysconfig.get_paths()["purelib"])
    version = next((each for each in peer.pythons if _interpreter(each, missing_ok=True)), None)
    if version is None:
        raise UnavailableError(f"needs Python {' or '.join(peer.pythons)}, which is neither on PATH nor pyenv's")
    home = folder / f"shared-{version}"
    stamp = home / f".installed-{_digest(shared)}"
    if not stamp.is_file():
        shutil.rmtree(home, ignore_errors=True)
        _run([str(_interpreter(version)), "-m", "venv", "--without-pip", str(home)])
        _install(home / "bin" / "python", shared)
        stamp.touch()
    return version, home / "lib" / f"python{version}" / "site-packages"


def _interpreter(version: str, *, missing_ok: bool = False) -> Path | None:
    """Return a Python of a version: this one, one on PATH, or one of pyenv's. A shim of pyenv may exist and not run."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    for candidate in [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"{version}.*/bin/python3"))]:
        asked = subprocess.run([candidate, "-c", "import venv"], capture_output=True, check=False)  # noqa: S603 - a Python
        if asked.returncode == 0:
            return candidate
    if missing_ok:
        return None
    raise UnavailableError(f"needs Python {version}, which is neither on PATH nor pyenv's")


def _install(python: Path, arguments: list[str]) -> None:
    if arguments:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
        _run([*pip, "install", "--quiet", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - venv and pip
    if done.returncode:
        raise UnavailableError((done.stderr or done.stdout).strip().splitlines()[-1])


def _digest(values: list[str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]
