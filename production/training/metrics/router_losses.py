"""Report auxiliary losses of experts as the `training_log` of Megatron-LM's driver does: by megatron-core's tracker,
under its names.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kind of `moe_router_load_balancing_type` to the tracker's name of the loss."""
Z_LOSS = "z_loss"


def router_loss_names(config: Any) -> tuple[str, ...]:
    """Return the names of the losses that a model's routers add; empty without experts, or where every coefficient is 0."""
    if config.num_moe_experts is None:
        return ()
    kinds, coefficients = (
        list(each) if isinstance(each, list | tuple) else [each]
        for each in (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    )
    found = [NAMES[kind] for kind, factor in zip(kinds, coefficients, strict=True) if kind in NAMES and factor]
    return (*found, *([Z_LOSS] if config.moe_z_loss_coeff is not None else []))


def take_router_losses(
    config: Any, *, microbatches: int, hybrid_layer_pattern: str | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a step's losses by name, means over microbatches and layers with experts, and clear the tracker.

    Scalars on the device, without the coefficients; right on the last pipeline stage. Collective over the world where there is a name.
    """
    names = router_loss_names(config)
    if not names:
        return {}
    tracker = get_moe_metrics_tracker()
    for name in names:  # a stage without such a layer has recorded nothing, and takes part
        tracker.ensure_initialized(name, config.num_layers + (config.mtp_num_layers or 0), device=device)
    is_hybrid = hybrid_layer_pattern is not None
    found: dict[str, torch.Tensor] = {}
    tracker.report(
        loss_scale=1 / microbatches,
        iteration=0,  # for writers, of which there is none
        track_names=list(names),
        num_layers=get_hybrid_layer_counts(hybrid_layer_pattern)[Symbols.MOE] if is_hybrid else config.num_layers,
        moe_layer_freq=1 if is_hybrid else config.moe_layer_freq,
        mtp_num_layers=config.mtp_num_layers,
        total_loss_dict=found,
    )
    return found


def clear_router_losses() -> None:
    """Clear what a validation, or an earlier job in this process, has recorded."""
    get_moe_metrics_tracker().clear()
