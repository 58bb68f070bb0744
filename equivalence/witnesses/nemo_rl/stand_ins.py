"""Stand in for packages that NeMo-RL's modules import and that are not installed: the one list of them, and how they are lent.

A stand-in has every name and does nothing. While modules are imported it may decorate and be inherited from; called later it raises, so
that no result can come from one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from equivalence.errors import WitnessError

PACKAGES = {
    "ray": "workers of a cluster",
    "megatron.bridge": "conversion of checkpoints, and the cut of models that slice rows themselves",
    "torchdata": "the loader of a run",
    "hydra": "configuration",
    "soundfile": "audio",
    "scipy": "resampling of audio",
    "decord": "video",
    "pynvml": "memory of a GPU",
    "zmq": "messages to inference servers",
    "uvicorn": "inference servers",
    "fastapi": "inference servers",
    "wandb": "logging",
    "mlflow": "logging",
    "swanlab": "logging",
    "prometheus_client": "logging",
    "matplotlib": "plots",
}
"""Package to what NeMo-RL has it for; none of it makes a row, a batch, a bin or a loss."""
ALWAYS = ("ray",)
"""Packages that are stood in for where they are installed as well: a process with Ray in it starts threads, and a witness forks."""
TRANSFORMERS = "5.11.0"
"""Version that transformers shows while NeMo-RL is imported: its `models/policy` refuses to be imported under 5.12 and later."""
OTHERS = (
    f"transformers shows the version {TRANSFORMERS} while modules are imported",
    "Transformer Engine's kernel thd_get_partitioned_indices: a loop over segments and chunks (equivalence/trainers/megatron_step.py)",
    "a process group of torch's own `fake` backend: the size and the rank of the context-parallel group, no messages",
    "the device cuda: the CPU (production/model/device/shim.py)",
    "the shuffle of first_fit_shuffle: an order that is given",
)
"""What else is not NeMo-RL as it comes."""
_PACKAGE = "nemo_rl"


def stand_ins() -> list[str]:
    """Return a line for each stand-in of this environment; installed packages need none, but for those of `ALWAYS`."""
    return [f"{name}: {what}" for name, what in PACKAGES.items() if _is_stood_in(name)] + list(OTHERS)


class CheckoutModules:
    """Modules of a checkout, imported as they are asked for."""

    def __init__(self, finder: _Finder, root: Path) -> None:
        self._finder = finder
        self._root = root

    def get(self, module: str, name: str) -> Any:
        """Return a name of a module. WitnessError for a name that the module lacks, and for a package without a stand-in."""
        loaded = self.module(module)
        if not hasattr(loaded, name):
            raise WitnessError(f"{module} of {self._root} has no {name}: the checkout is of another version")
        return getattr(loaded, name)

    def module(self, name: str) -> ModuleType:
        """Return a module of the checkout. WitnessError as `get`."""
        if name in sys.modules:
            return sys.modules[name]
        try:
            with _version_lent(), self._finder.importing():
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise self._missing(name, str(error.name)) from error

    def _missing(self, name: str, package: str) -> WitnessError:
        if package.split(".", maxsplit=1)[0] == _PACKAGE:
            return WitnessError(f"{self._root} has no module {package}: the checkout is of another version")
        return WitnessError(
            f"{name} of {self._root} needs the package {package}, which is not installed: install it, or if it makes none of what is "
            "compared add it to PACKAGES in equivalence/witnesses/nemo_rl/stand_ins.py"
        )


@contextlib.contextmanager
def checkout_modules(root: Path) -> Iterator[CheckoutModules]:
    """Context manager: within, `nemo_rl` is the checkout's; every module, stand-in and environment variable is put back on exit."""
    # Each of these looks for optional packages on import, and must not find a stand-in.
    for name in ("datasets", "transformers", "torch.utils.tensorboard"):
        importlib.import_module(name)
    environment, modules = dict(os.environ), set(sys.modules)
    finder = _Finder([name for name in PACKAGES if _is_stood_in(name)])
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, finder)
    try:
        yield CheckoutModules(finder, root)
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(root))
        for name in set(sys.modules) - modules:
            if name.split(".")[0] == _PACKAGE or finder.holds(name):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


def _is_stood_in(name: str) -> bool:
    if name in ALWAYS and name not in sys.modules:
        return True
    return not _is_installed(name)


def _is_installed(name: str) -> bool:
    found = sys.modules.get(name)
    if found is not None:
        return not isinstance(found.__loader__, _Loader)
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


@contextlib.contextmanager
def _version_lent() -> Iterator[None]:
    transformers: Any = importlib.import_module("transformers")
    shown = transformers.__version__
    transformers.__version__ = TRANSFORMERS
    try:
        yield
    finally:
        places: list[Any] = [transformers, sys.modules["transformers"]]
        for place in places:
            place.__version__ = shown


class _StandIn(type):
    """Class of every name of a stand-in."""

    finder: _Finder

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(f"{cls.__name__}.{name}", cls.finder)

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __or__(cls, _: object) -> Any:
        return cls

    def __ror__(cls, _: object) -> Any:
        return cls

    def __call__(cls, *given: Any, **options: Any) -> Any:
        if not cls.finder.is_importing:
            raise WitnessError(
                f"{cls.__name__} was called, and only stands in: what is compared needs the package itself"
            )
        if len(given) == 1 and callable(given[0]) and not options:
            return given[0]  # a decorator
        return lambda decorated: decorated


def _named(name: str, finder: _Finder) -> Any:
    return _StandIn(name, (), {"finder": finder})


class _Loader(importlib.abc.Loader):
    def __init__(self, finder: _Finder) -> None:
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _named(f"{module.__name__}.{name}", self._finder)

        module.__getattr__ = named  # type: ignore[method-assign]  # the names of a module without content


class _Finder(importlib.abc.MetaPathFinder):
    """Find a stand-in for packages that no other finder has."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages
        self.is_importing = False

    def holds(self, name: str) -> bool:
        """Return whether a module is a stand-in's."""
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in; None for any other module."""
        del path, target
        if self.is_importing and fullname.startswith(_PACKAGE):
            # Again before each module: on some of its imports transformers puts another module in its own place.
            sys.modules["transformers"].__version__ = TRANSFORMERS  # type: ignore[attr-defined]
        if not self.holds(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(self), is_package=True)

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Context manager: within, a stand-in may decorate."""
        before, self.is_importing = self.is_importing, True
        try:
            yield
        finally:
            self.is_importing = before
