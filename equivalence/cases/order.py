"""A case of the check on data order: one way through the rows of some sources."""

from __future__ import annotations

from dataclasses import dataclass

from production.training.order_settings import Kind, LastBatch


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """One way through some rows."""

    rows: tuple[int, ...]
    """Of each source."""
    kind: Kind
    last_batch: LastBatch
    global_batch_size: int
    data_parallel_size: int
    seed: int | None = None
    max_epochs: int | None = None
    weights: tuple[float, ...] | None = None
    steps: int
    """Compared at most."""
    consumed_steps: int = 0
    """Global batches consumed before."""
    run_steps: int | None = None
    """Of a cyclic run, which may be longer than what is compared."""

    @property
    def consumed_samples(self) -> int:
        """Samples consumed before."""
        return self.consumed_steps * self.global_batch_size
