"""Replace from outside what Megatron-LM's driver takes for granted and CPU ranks lack; STAND_INS lists every replacement."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from equivalence.trainers.megatron_step import partitioned_indices
from production.model.device.attention import SegmentAttention
from production.model.device.norm import RMSNorm
from production.model.device.shim import cpu_shim
from production.training.checkpoint.megatron_state import results_in_this_process

STAND_INS = {
    "CUDA": "devices, their capability, streams, events, memory statistics and random states on CPU: production.model.device.shim, "
    "tools.compare_runs.driver.stand_ins",
    "initialize_megatron": "called with allow_no_cuda=True, its own argument",
    "compile_helpers": "nothing is compiled: the wheel has no Makefile, and SFTDataset needs no index of documents",
    "thd_get_partitioned_indices": "Transformer Engine's CUDA kernel: equivalence.trainers.megatron_step",
    "core attention": "Transformer Engine's, in LocalSpecProvider: production.model.device.attention",
    "norm": "WrappedTorchNorm refuses sequence parallelism: production.model.device.norm",
    "names of experts' norms": "--transformer-impl local names the norm before experts as fc1's; here as Transformer "
    "Engine's layers do",
    "checkpoint writer": "a queue in the same process in place of a server process",
}
"""Stand-ins by the part that each replaces; reports list them. Everything else is the driver's and the wheel's own."""

_NO_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Context manager in which Megatron-LM's driver runs on this CPU rank. Enter it in a process of its own, before megatron is imported."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(cpu_shim())
        for name in _NO_MEMORY:
            undo.enter_context(mock.patch.object(torch.cuda, name, _no_memory))
        undo.enter_context(results_in_this_process())
        _model(undo)
        _training(undo)
        yield


def _no_memory(*_args: Any, **_options: Any) -> int:
    return 0


def _newest_device() -> int:
    """Return the capability of a device for which Megatron-LM demands no environment variable that orders kernels."""
    return 10


def _compile_nothing() -> None:
    pass


def _model(undo: contextlib.ExitStack) -> None:
    from megatron.core import utils  # noqa: PLC0415 - behind the shim
    from megatron.core.models.backends import LocalSpecProvider  # noqa: PLC0415
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: PLC0415
    from megatron.core.transformer import transformer_block  # noqa: PLC0415

    submodules = gpt_layer_specs.get_gpt_layer_local_submodules

    @functools.wraps(submodules)
    def with_the_names_of_fused_layers(num_experts: int | None = None, *args: Any, **options: Any) -> Any:
        found = submodules(num_experts, *args, **options)
        if num_experts:
            del found.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        return found

    for owner, name, value in (
        (utils, "tex", SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)),
        (LocalSpecProvider, "core_attention", lambda _self: SegmentAttention),
        (LocalSpecProvider, "layer_norm", lambda _self, *_args, **_options: RMSNorm),
        (transformer_block, "LayerNormImpl", RMSNorm),
        (gpt_layer_specs, "LNImpl", RMSNorm),
        (gpt_layer_specs, "get_gpt_layer_local_submodules", with_the_names_of_fused_layers),
    ):
        undo.enter_context(mock.patch.object(owner, name, value))


def _training(undo: contextlib.ExitStack) -> None:
    from megatron.core.datasets import utils as dataset_utils  # noqa: PLC0415 - behind the shim
    from megatron.training import arguments, training  # noqa: PLC0415 - seconds

    without_cuda = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    undo.enter_context(mock.patch.object(training, "initialize_megatron", without_cuda))
    undo.enter_context(mock.patch.object(arguments, "get_device_arch_version", _newest_device))
    undo.enter_context(mock.patch.object(dataset_utils, "compile_helpers", _compile_nothing))
