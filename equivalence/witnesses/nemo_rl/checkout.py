"""Keep one checkout of NeMo-RL as a witness, and say by name which parts it has and which it lacks, from its source alone."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equivalence.cache import cache_root
from equivalence.errors import InputError

NAME = "nemo_rl"
"""Name of the witness as a subject."""
COMMAND_NAMES = ("nemo-rl", NAME)
"""Its names on a command line."""
_RECORD = "checkout.json"
_DATA = "nemo_rl.models.megatron.data"
_BATCHES = "nemo_rl.distributed.batched_data_dict"
_DIRECT_ROWS: Mapping[str, tuple[str, ...]] = {
    _DATA: ("get_microbatch_iterator", "_validate_direct_packed_microbatch"),
    _BATCHES: ("BatchedDataDict",),
}
_LOSSES: Mapping[str, tuple[str, ...]] = {
    "nemo_rl.models.megatron.train": ("LossPostProcessor",),
    "nemo_rl.algorithms.loss.loss_functions": ("NLLLossFn",),
}
PARTS: dict[str, Mapping[str, tuple[str, ...]]] = {
    "rows": {
        "nemo_rl.data.megatron_sft_packed": ("megatron_sft_packed_preprocessor",),
        "nemo_rl.data.datasets.response_datasets.megatron_sft_packed": ("MegatronSFTPackedDataset", "format_data"),
    },
    "batches": {
        "nemo_rl.data.collate_fn": ("_collate_megatron_sft_packed",),
        "nemo_rl.algorithms.utils": ("maybe_pad_last_batch",),
    },
    "shares": _DIRECT_ROWS,
    "depths": _DIRECT_ROWS,
    "packers": {"nemo_rl.data.packing.algorithms": ("get_packer", "_adjust_bin_count")},
    "conversations": {
        "nemo_rl.data.processors": ("sft_processor",),
        "nemo_rl.data.interfaces": ("TaskDataSpec",),
        "nemo_rl.data.llm_message_utils": ("add_loss_mask_to_message_log", "batched_message_log_to_flat_message"),
    },
    "online rows": {
        _DATA: ("get_microbatch_iterator", "_pack_sequences_for_megatron", "process_global_batch"),
        _BATCHES: ("BatchedDataDict", "shard_by_batch_size"),
        "nemo_rl.data.llm_message_utils": ("batched_message_log_to_flat_message",),
    },
    "direct loss": {**_LOSSES, "nemo_rl.models.megatron.train": ("LossPostProcessor", "prepacked_loss_mask")},
    "online loss": {**_LOSSES, _DATA: ("get_microbatch_iterator", "_pack_sequences_for_megatron")},
}
"""Part of NeMo-RL to the names that it needs, by module: functions, classes, methods and parameters."""


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout of NeMo-RL."""

    root: str
    """Folder that holds `nemo_rl`."""
    commit: str
    """Commit that git told when the checkout was added; empty for a folder without git."""

    @property
    def command(self) -> str:
        """Return the command line that serves the rows."""
        return shlex.join([sys.executable, "-m", "equivalence.witnesses.nemo_rl.serve", self.root])

    @property
    def text(self) -> str:
        """Return where the checkout lies and what it is: an exported tree has no commit, but a fingerprint."""
        commit = f", commit {self.commit}" if self.commit else ""
        return f"checkout {self.root}{commit}, sources {self.fingerprint}"

    @property
    def fingerprint(self) -> str:
        """Return the first digits of a hash of the modules that PARTS names."""
        files = {_file(Path(self.root), module) for needed in PARTS.values() for module in needed}
        hashed = hashlib.sha256()
        for file in sorted(file for file in files if file is not None):
            hashed.update(f"{file.as_posix()}\0".encode() + (Path(self.root) / file).read_bytes() + b"\0")
        return hashed.hexdigest()[:12]

    def lacking(self) -> dict[str, list[str]]:
        """Return the parts that the checkout lacks, with what is missing of each; empty for a checkout that has all."""
        missing = {part: _missing(Path(self.root), needed) for part, needed in PARTS.items()}
        return {part: names for part, names in missing.items() if names}

    def require(self, part: str) -> None:
        """Refuse a part that the checkout lacks. InputError names what it lacks and what it has."""
        lacking = self.lacking()
        if part in lacking:
            has = ", ".join(each for each in PARTS if each not in lacking) or "none"
            raise InputError(
                f"{NAME} has no {part}: {self.root} lacks {', '.join(lacking[part])}; it has {has}. Add a checkout that has them, such as the "
                "tree of pull request 3380"
            )


def add(source: Path) -> Checkout:
    """Keep a checkout as the witness. InputError for a folder without any part of NeMo-RL, and where one is kept already."""
    root = source.resolve()
    if not (root / NAME / "__init__.py").is_file():
        raise InputError(
            f"--source must be the root of a NeMo-RL checkout, got {root}, which has no {NAME}/__init__.py"
        )
    if (_folder() / _RECORD).exists():
        raise InputError(f"the witness {NAME} is there; remove it first: packproof witness remove nemo-rl")
    checkout = Checkout(root=str(root), commit=_commit(root))
    lacking = checkout.lacking()
    if len(lacking) == len(PARTS):
        first = next(iter(lacking.values()))
        raise InputError(
            f"{root} has {NAME} and none of the parts {', '.join(PARTS)}: it lacks {', '.join(first)} and more"
        )
    _folder().mkdir(parents=True, exist_ok=True)
    record = json.dumps({"root": checkout.root, "commit": checkout.commit}, indent=2)
    (_folder() / _RECORD).write_text(record, encoding="utf-8")
    return checkout


def find() -> Checkout | None:
    """Return the checkout that is kept, None if there is none. InputError for one that has been moved away since, and for a damaged record."""
    record, fix = _folder() / _RECORD, "packproof witness remove nemo-rl, then add nemo-rl --source DIR"
    try:
        said = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f"{record} is no record of a checkout ({error}): {fix}") from error
    if not (isinstance(said, dict) and said.keys() == {"root", "commit"} and {*map(type, said.values())} == {str}):
        raise InputError(f"{record} must be an object of root and commit, both text: {fix}")
    checkout = Checkout(**said)
    if not (Path(checkout.root) / NAME).is_dir():
        raise InputError(f"the checkout of the witness {NAME} is no longer at {checkout.root}: {fix}")
    return checkout


def needed() -> Checkout:
    """Return the checkout that is kept. InputError where there is none."""
    if (checkout := find()) is not None:
        return checkout
    raise InputError(
        f"there is no checkout for the witness {NAME}: packproof witness add nemo-rl --source DIR. Its recorded outcomes are held without one, by "
        "packproof witness compare nemo-rl and in every run of equivalence"
    )


def remove() -> None:
    """Forget the checkout, which stays where it is. InputError where there is none."""
    if not (_folder() / _RECORD).exists():
        raise InputError(f"there is no checkout for the witness {NAME}")
    shutil.rmtree(_folder())


def _folder() -> Path:
    return cache_root() / "witnesses" / NAME


def _missing(root: Path, needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    missing = []
    for module, names in needed.items():
        file = _file(root, module)
        if file is None:
            missing.append(f"{Path(*module.split('.')).with_suffix('.py')}")
        else:
            missing += [f"{name} of {file}" for name in names if name not in _defined(root / file)]
    return missing


def _file(root: Path, module: str) -> Path | None:
    """Return a module's file below `root`; None if there is none."""
    path = Path(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if (root / each).is_file()), None)


@functools.cache
def _defined(file: Path) -> frozenset[str]:
    """Return the names of a file's functions, classes, methods and parameters. InputError for a file that is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{file} is not valid Python ({error}): give a complete checkout") from error
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    return frozenset(names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)})


def _commit(root: Path) -> str:
    """Return the commit of a work tree whose top is `root`; empty for a folder that git does not know."""
    git = shutil.which("git")
    if git is None:
        return ""
    told = subprocess.run(  # noqa: S603 - git, and a folder
        [git, "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"], capture_output=True, text=True, check=False
    )
    top, _, commit = told.stdout.strip().partition("\n")
    return commit if told.returncode == 0 and Path(top).resolve() == root else ""
