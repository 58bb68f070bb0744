"""Serve another version's rows: `python -m equivalence.witnesses.serve VERSION ROOT`, started by `megatron_lm@VERSION`.

Nothing of megatron is imported before ROOT stands first on the path.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packproof_subject import Refused, serve

PRESETS = {"0.17": "megatron-lm-0.17", "0.18": "megatron-lm-0.18", "0.19": "megatron-lm-0.19"}
"""Minor version to the preset of its rows; a later version has that of main."""
LATEST = "megatron-lm-main"


def preset_of(version: str) -> str:
    """Return the preset whose rows a version of megatron-core builds."""
    return PRESETS.get(".".join(version.split(".")[:2]), LATEST)


def check_whole(root: Path, halves: Mapping[str, str]) -> None:
    """Refuse a witness of which one half comes from elsewhere: `megatron` is a namespace package, whose halves mix silently.

    `halves` maps module to file. RuntimeError names each half and its file.
    """
    strange = [name for name, file in halves.items() if not Path(file).resolve().is_relative_to(root.resolve())]
    if strange:
        told = ", ".join(f"{name} from {file}" for name, file in halves.items())
        raise RuntimeError(f"both must come from {root}, got {told}; add the witness again")


def import_halves(root: str) -> dict[str, str]:
    """Put `root` first on the path, import both halves of a version and return the file of each; RuntimeError as `check_whole`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.path.insert(0, root)
    core, training = (
        importlib.import_module(name) for name in ("megatron.core", "megatron.training.datasets.sft_dataset")
    )
    halves = {"megatron.core": str(core.__file__), "megatron.training": str(training.__file__)}
    check_whole(Path(root), halves)
    return halves


def main(argv: Sequence[str] | None = None) -> None:
    """Answer until the other side closes stdin."""
    version, root = sys.argv[1:] if argv is None else argv
    halves = import_halves(root)
    subject = importlib.import_module("equivalence.subjects.megatron_lm").SUBJECT
    tokenizers = importlib.import_module("equivalence.subjects.tokenizers")
    settings_class = importlib.import_module("equivalence.subjects.protocol").RowSettings
    transformers = importlib.import_module("transformers")
    shipped = str(importlib.import_module("megatron.core").__version__)
    preset = preset_of(shipped)

    def build_row(messages: Any, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
        row = subject.build_row(messages, tokenizers.load_folder(Path(folder)), settings_class(**settings))
        if row.refusal is not None:
            raise Refused(row.refusal.kind, row.refusal.message)
        names = ("input_ids", "target_ids", "token_mask", "position_ids", "cu_seqlens")
        return {name: getattr(row, name) for name in names}

    told = f"megatron-core {shipped}, transformers {transformers.__version__}; " + ", ".join(
        f"{name} from {Path(file).parent}" for name, file in halves.items()
    )
    serve(build_row=build_row, name=f"megatron_lm@{version}", version=told, semantics=[preset])


if __name__ == "__main__":
    main()
