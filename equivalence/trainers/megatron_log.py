"""Collect what `megatron.training.training.training_log` reads of a step beside its losses: the routers' losses, and its values for TensorBoard."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker


class Written:
    """A writer of TensorBoard that keeps the scalars."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, _step: int) -> None:
        """Keep one."""
        self.scalars[name] = float(value)


def router_losses(config: Any, *, microbatches: int, hybrid_layer_pattern: str | None) -> dict[str, float]:
    """Return the routers' losses as training_log reports them; those of a coefficient 0, which it reports as 0, are left out.

    Right on the last pipeline stage, which prints. Collective over the world.
    """
    if config.num_moe_experts is None:
        return {}
    kinds = config.moe_router_load_balancing_type
    names = []
    if "aux_loss" in kinds:
        names.append("load_balancing_loss")
    if "seq_aux_loss" in kinds:
        names.append("seq_load_balancing_loss")
    if "global_aux_loss" in kinds:
        names.append("global_load_balancing_loss")
    if config.moe_z_loss_coeff is not None:
        names.append("z_loss")
    layers = config.num_layers
    tracker = get_moe_metrics_tracker()
    for name in names:  # as large as the routers' own record, which force_initialize of a hybrid model is not
        tracker.ensure_initialized(name, layers + (config.mtp_num_layers or 0))
    if hybrid_layer_pattern is not None:
        layers = get_hybrid_layer_counts(hybrid_layer_pattern)[Symbols.MOE]
    found: dict[str, torch.Tensor] = {}
    tracker.report(
        loss_scale=1 / microbatches,
        iteration=0,
        force_initialize=True,
        track_names=names,
        num_layers=layers,
        moe_layer_freq=config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
        total_loss_dict=found,
    )
    return {name: float(loss) for name, loss in found.items() if float(loss) or name == "z_loss"}
