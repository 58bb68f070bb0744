"""Imports in the parent what every rank needs, so that a fork has it at once: 13 s of imports are paid once."""

from __future__ import annotations

import importlib
import logging

from production.library_warnings import quiet_libraries

MEGATRON = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.hybrid",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.packed_seq_params",
)
"""Modules of megatron-core that a case with a model imports."""


def preload(*modules: str, megatron: bool = True) -> None:
    """Import torch.distributed, megatron-core (unless told not to) and `modules`; a second call costs nothing.

    Call `preload`, and open worlds, from a parent that has run no OpenMP region with several threads and no backward pass on a device. A fork
    does not copy their threads, and a child that needs them waits for ever (and is then reported as stuck in `open_world` or in its case).
    torch cannot tell whether either has happened, so nothing here checks it. Children run with one thread, which needs no pool: a parent at
    OMP_NUM_THREADS=1 is always safe.
    """
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    with quiet_libraries():
        logger.setLevel(logging.ERROR)  # "No CUDA runtime is found", which the CPU shim is for
        try:
            for name in ("torch.distributed", *(MEGATRON if megatron else ()), *modules):
                importlib.import_module(name)
        finally:
            logger.setLevel(level)
