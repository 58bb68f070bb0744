"""Load and save Hugging Face checkpoints through Megatron-Bridge (extra `bridge`), which maps the names of each
architecture.

The module is written against Megatron-Bridge's documented interface (`AutoBridge`, releases 0.6 and 0.7) and has
never run here: the package needs CUDA and kernels that this project was made without. `production.training.export`
does not need the package.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from production.errors import PackproofError
from production.model.weights import unwrap


def load_huggingface(model: torch.nn.Module, name: str) -> None:
    """Load the weights of a Hugging Face checkpoint (a folder or a name) into this rank's part of the model, in any layout.

    Call it before an optimizer is made, which keeps copies. Collective over the world. Raises PackproofError where Megatron-Bridge
    is not installed, does not know the architecture, or the model's shape is not the checkpoint's.
    """
    if not name:
        raise PackproofError(
            what="the name of the weights must not be empty",
            where="model.initial_path",
            fix="give a folder or a Hugging Face name",
        )
    bridge = _bridge(name, where="model.initial: huggingface")
    with torch.no_grad():
        _asked(bridge.load_hf_weights, name, [unwrap(model)])


def save_huggingface(model: torch.nn.Module, name: str, folder: Path) -> None:
    """Write the model as a Hugging Face checkpoint: weights, config and tokenizer files of `name`, into `folder`.

    Collective over the world. Raises PackproofError as `load_huggingface`.
    """
    bridge = _bridge(name, where="export --huggingface")
    with torch.no_grad():
        _asked(bridge.save_hf_pretrained, name, [unwrap(model)], str(folder))


def check_bridge(where: str) -> Any:
    """Return Megatron-Bridge's module.

    Raises PackproofError where the module cannot be imported; `where` names the caller.
    """
    try:
        return importlib.import_module("megatron.bridge")
    except ImportError as error:
        raise PackproofError(
            what=f"Megatron-Bridge cannot be imported: {error}",
            where=where,
            fix="install the extra `bridge` (package megatron-bridge; it needs CUDA), or work without it: model.initial=megatron starts from "
            "a megatron-core checkpoint, and export without --huggingface writes plain weights",
        ) from error


def _bridge(name: str, *, where: str) -> Any:
    return _asked(check_bridge(where).AutoBridge.from_hf_pretrained, name, name)


def _asked(call: Any, name: str, *given: Any) -> Any:
    try:
        return call(*given)
    except (ValueError, KeyError, OSError, NotImplementedError, RuntimeError) as error:
        raise PackproofError(
            what=f"Megatron-Bridge refuses the checkpoint: {error}",
            where=name,
            fix="give a checkpoint whose architecture Megatron-Bridge supports, and set section `model` to the shape in the checkpoint's config.json",
        ) from error
