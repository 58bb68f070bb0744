"""Define how a job goes through its rows, and refuse impossible orders (docs/SPEC.md#order)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from production.errors import PackproofError

Kind = Literal["sequential", "shuffle", "megatron-cyclic", "megatron-cyclic-sharded"]
LastBatch = Literal["drop", "wrap", "stop"]

_CYCLIC = ("megatron-cyclic", "megatron-cyclic-sharded")


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """Settings of a job's order of rows. Nothing that changes a number has a default. Raises PackproofError."""

    kind: Kind
    """`sequential` as Megatron-LM's sampler (R-ORDER-1), `shuffle` seeded by epoch (R-ORDER-4), or what Megatron-LM's driver draws with
    `--dataloader-type cyclic`, without and with `--data-sharding` (R-ORDER-5); the draw of the last two is torch's own."""
    last_batch: LastBatch
    """What happens where an epoch ends inside a global batch: `drop` its last rows, `wrap` into the next epoch, or `stop` before them (R-ORDER-3)."""
    global_batch_size: int
    """Rows of a global batch."""
    data_parallel_size: int
    """dp: must divide it."""
    seed: int | None = None
    """Seed of `shuffle`, from 0 to 2**64 - 1; the other kinds take no seed."""
    max_epochs: int | None = None
    """Epochs after which the order ends; None never ends."""
    run_steps: int | None = None
    """Steps of the whole run, which the cyclic kinds permute as one; the other kinds take no steps."""
    weights: tuple[float, ...] | None = None
    """Weight of each source of a blend (R-ORDER-6); None where there is one source."""

    def __post_init__(self) -> None:
        """Refuse settings that no order could satisfy, or that leave something to be guessed."""
        for name, choices in (("kind", get_args(Kind)), ("last_batch", get_args(LastBatch))):
            if (value := getattr(self, name)) not in choices:
                raise order_refused(
                    f"must be one of {', '.join(choices)}, got {value!r}", name, f"choose one of {', '.join(choices)}"
                )
        for name in ("global_batch_size", "data_parallel_size", "max_epochs", "run_steps"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise order_refused(f"must be at least 1, got {size}", name, "give at least 1")
        if self.global_batch_size % self.data_parallel_size:
            what = f"must be a multiple of data_parallel_size, {self.data_parallel_size}, got {self.global_batch_size}"
            raise order_refused(what, "global_batch_size", "make it a multiple of data_parallel_size")
        if (self.kind == "shuffle") != (self.seed is not None):
            why = (
                "must be set for the order shuffle"
                if self.seed is None
                else f"must not be set for the order {self.kind}, which draws nothing from it, got {self.seed}"
            )
            raise order_refused(why, "seed", "give a seed to the order shuffle only")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise order_refused(
                f"must be from 0 to 2**64 - 1, got {self.seed}", "seed", "give a seed from 0 to 2**64 - 1"
            )
        self._check_cyclic()
        if self.weights is not None:
            self._check_blend(self.weights)

    def _check_cyclic(self) -> None:
        if self.kind not in _CYCLIC:
            if self.run_steps is not None:
                raise order_refused(
                    f"must not be set for the order {self.kind}, which does not depend on the length of the run, got {self.run_steps}",
                    "run_steps",
                    "leave it out",
                )
            return
        if self.last_batch != "wrap":
            what = f"must be wrap for the order {self.kind}, got {self.last_batch}: it permutes the samples of the whole run, which has no epochs"
            raise order_refused(what, "last_batch", "set it to wrap, or choose the order sequential or shuffle")
        if self.max_epochs is not None:
            what = f"must not be set for the order {self.kind}, got {self.max_epochs}: it permutes the samples of the whole run, which has no epochs"
            raise order_refused(what, "max_epochs", "leave it out (in a job: null) and set the number of steps")
        if self.run_steps is None:
            what = f"must be set for the order {self.kind}, which permutes the samples of the whole run"
            raise order_refused(what, "run_steps", "set the number of steps, or choose the order sequential or shuffle")

    def _check_blend(self, weights: tuple[float, ...]) -> None:
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise order_refused(
                f"each weight must be finite and above 0, got {weights}",
                "weights",
                "give each source a finite weight above 0",
            )
        if self.kind in _CYCLIC:
            raise order_refused(
                f"must be sequential or shuffle for a blend, got {self.kind}", "kind", "choose sequential or shuffle"
            )
        if self.last_batch != "wrap":
            what = f"must be wrap for a blend, got {self.last_batch}: each source of a blend ends its own epochs"
            raise order_refused(what, "last_batch", "set it to wrap")
        if self.max_epochs is not None:
            what = f"must not be set for a blend, got {self.max_epochs}: each source of a blend ends its own epochs"
            raise order_refused(what, "max_epochs", "leave it out (in a job: null) and set the number of steps")


def order_refused(what: str, where: str, fix: str) -> PackproofError:
    """Return the error for an impossible order."""
    return PackproofError(what=what, where=where, fix=fix)
