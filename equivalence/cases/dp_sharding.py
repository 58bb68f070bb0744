"""A case of the check on data-parallel sharding: the rows of one validation and the ranks that share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from equivalence.cases.step import batch_of
from production.rows.batch import Batch


@dataclass(frozen=True, kw_only=True)
class SharesCase:
    """A validation of some rows, of which the last global batch may be short."""

    rows: tuple[tuple[int, ...], ...]
    """Lengths of the segments of each row; all rows have one sum."""
    data_parallel_size: int
    microbatches: int
    """Of each rank in a global batch."""
    seed: int
    """Of tokens and masks."""
    long: int = 0
    """Unless 0, targets are also counted as if each row repeated its first token this many times: more than 2**24 exceed float32."""

    @property
    def global_batch_size(self) -> int:
        """Rows of a whole global batch."""
        return self.data_parallel_size * self.microbatches

    def batch(self) -> Batch:
        """Return all rows, drawn from the seed."""
        made = torch.Generator().manual_seed(self.seed)
        shape = len(self.rows), sum(self.rows[0])
        ids, targets = (torch.randint(0, 1000, shape, generator=made) for _ in range(2))
        return batch_of(self.rows, ids, targets, torch.randint(0, 2, shape, generator=made).float())
