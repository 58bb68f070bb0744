"""Define the numbers of a step for loggers, progress and summary, on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

_OF_DEPTHS = {"mtp_losses": "loss", "mtp_token_losses": "loss_by_tokens", "mtp_empty_shares": "empty_shares"}
"""Fields with a number for each depth, to what a record calls it behind `mtp_1_`."""
DIMENSIONS = ("tp", "cp", "dp", "pp")
"""Dimensions of a rank's coordinates in the order in which ranks count, tp fastest."""


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Holds one step's numbers, equal on every rank of the world. None: not measured."""

    step: int
    """1 for the first step."""
    loss: float | None
    """Σ loss·mask ÷ Σ mask over all microbatches and dp × cp ranks (R-LOSS-7); None where the whole global batch is masked."""
    all_masked: bool
    """Whether no token of the global batch was trained."""
    mtp_losses: tuple[float | None, ...]
    """[D]: of each depth of multi-token prediction Megatron-LM's own number (R-LOSS-10), a mean over shares in which a share without a
    target counts as 0; None where no share has one."""
    mtp_acceptance_rates: tuple[float, ...] = ()
    """[D], in percent: positions at which a depth's best guess is its label, of those that count; NaN where none counts."""
    router_losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Auxiliary losses of experts by Megatron-LM's name, without their coefficients: means over microbatches and layers with experts."""
    gradient_norm: float | None
    """Gradient norm before clipping; None where the optimizer computes none."""
    learning_rate: float
    """Learning rate of the step."""
    consumed_samples: int
    """Rows of all steps so far, this one included."""
    step_seconds: float
    """From the end of the step before to the end of this one, on the rank of the world that took longest; on CUDA the device's own time."""
    data_wait_seconds: float
    """Seconds of the rank of the world that waited longest for rows, by its host's clock."""
    data_wait_rank: int
    """Rank that waited longest for rows."""
    tokens_per_second: float
    """Positions of the global batch per second, padding included, of all ranks together."""
    trained_tokens: int
    """Positions of the global batch whose label counts in the loss."""
    tokens: int
    """Positions of the global batch, padding included."""
    padding_share: float
    """Share of padding in the positions, 0 to 1."""
    rows_truncated: int
    """Rows of the global batch that end within a conversation."""
    conversations_dropped: int
    """Conversations of the global batch that have no token in a row."""
    conversations_masked_out: int
    """Online conversations of the global batch that were too long, and so trained nothing (R-ONLINE-8)."""
    control_tokens: int = 0
    """Control tokens that stand in contents of the global batch as text (SPEC R-TOLD-2)."""
    labels_masked_as_padding: int = 0
    """Labels of contents that do not count because they are the pad token's id (SPEC R-TOLD-2)."""
    prompt_messages_trained: int = 0
    """Messages of the system, users and tools in the global batch that are trained, since the format masks none (SPEC R-TOLD-2)."""
    slowest_rank: int
    """The rank, of the whole world, with the longest `Timing.own_seconds`. Ranks of one replica wait for each other within the
    passes (tp, cp, ep, pp), so that a slow one makes its replica slow: the replica is what is certain."""
    slowest_rank_place: tuple[int, int, int, int]
    """Coordinates of the slowest rank in tp, cp, dp and pp."""
    slowest_rank_behind_seconds: float
    """The slowest rank's seconds above the mean of all ranks."""
    memory_mebibytes: float
    """Memory of the rank of the world that uses the most: resident on CPU, the largest allocation so far on CUDA."""
    memory_rank: int
    """Rank that uses the most memory."""
    tflops_per_second: float | None = None
    """Model TFLOP/s of one device (`flops`), recomputation not counted."""
    mfu: float | None = None
    """Share of the device's dense bf16 peak; None where the peak is not known."""
    mtp_token_losses: tuple[float | None, ...] = ()
    """[D]: Σ loss·mask ÷ Σ mask of each depth over all shares, which no share without a target dilutes; None where not measured."""
    mtp_empty_shares: tuple[float | None, ...] = ()
    """[D]: of the shares (a rank's part of a microbatch) those without a target at that depth, 0 to 1; None where not measured."""

    def values(self) -> dict[str, float | int | bool]:
        """Return the values by the names that every logger uses, without values that were not measured.

        Depths are `mtp_1_loss`, `mtp_1_loss_by_tokens`, `mtp_1_empty_shares` and so on; the slowest rank's
        coordinates are `slowest_rank_tp`, `_cp`, `_dp` and `_pp`.
        """
        found: dict[str, float | int | bool] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_DEPTHS:
                name = _OF_DEPTHS[field.name]
                found |= {f"mtp_{depth}_{name}": each for depth, each in enumerate(value, 1) if each is not None}
            elif field.name == "mtp_acceptance_rates":
                rates = ((f"mtp_{depth}_acceptance_rate", rate) for depth, rate in enumerate(value, 1))
                found |= {name: rate for name, rate in rates if not math.isnan(rate)}
            elif field.name == "router_losses":
                found |= value
            elif field.name == "slowest_rank_place":
                found |= {f"slowest_rank_{name}": place for name, place in zip(DIMENSIONS, value, strict=True)}
            elif field.name != "step" and value is not None:
                found[field.name] = value
        return found

    @property
    def finite(self) -> bool:
        """Return whether the losses and the gradient norm are finite."""
        numbers = (self.loss, *self.mtp_losses, *self.mtp_token_losses, self.gradient_norm)
        return all(math.isfinite(each) for each in numbers if each is not None)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Holds the losses of a global batch or of a whole validation."""

    loss: float | None
    """Σ loss·mask ÷ Σ mask; None where nothing is trained."""
    all_masked: bool
    """Whether no token is trained."""
    mtp_losses: tuple[float | None, ...]
    """[D]: losses of the depths as in `StepNumbers`, like the next two."""
    mtp_token_losses: tuple[float | None, ...]
    """[D]."""
    mtp_empty_shares: tuple[float | None, ...]
    """[D]."""
