"""Draw data orders and the shares of a global batch."""

from __future__ import annotations

import itertools

from equivalence.cases.dp_sharding import SharesCase
from equivalence.cases.order import OrderCase
from equivalence.generators.choices import Choices

_KINDS = ("sequential", "shuffle", "megatron-cyclic", "megatron-cyclic-sharded")


def draw_order(choices: Choices) -> OrderCase:
    """Draw a data order: one source or a blend; sequential, shuffled or cyclic; read from any step.

    An epoch's last batch is wrapped, dropped, or ends the run; a cyclic run ends after a drawn number of steps.
    """
    ranks = choices.integer(1, 4)
    kind = choices.one_of(_KINDS)
    is_cyclic = kind.startswith("megatron")
    is_blend = not is_cyclic and choices.one_of((False, True))
    wraps = is_cyclic or is_blend or choices.one_of((False, True))
    count = choices.integer(1, 5) if is_blend else 1
    rows = [choices.integer(1, 30) for _ in range(count)]
    steps, consumed_steps = choices.integer(1, 12), choices.integer(0, 12) if wraps else 0
    run_steps = consumed_steps + choices.integer(1, 24) if is_cyclic else None
    return OrderCase(
        rows=tuple(rows),
        kind=kind,  # type: ignore[arg-type] # one of them
        last_batch="wrap" if wraps else choices.one_of(("drop", "stop")),
        global_batch_size=ranks * choices.integer(1, 4),
        data_parallel_size=ranks,
        seed=choices.integer(0, 2**64 - 1) if kind == "shuffle" else None,
        max_epochs=None if is_blend or is_cyclic else choices.one_of((None, 1, 3)),
        weights=tuple(_weight(choices) for _ in range(count)) if is_blend else None,
        steps=steps,
        consumed_steps=consumed_steps,
        run_steps=run_steps,
    )


def draw_shares(choices: Choices) -> SharesCase:
    """Draw one to twelve rows of two to eight tokens, whose last global batch is often short of dp."""
    length = choices.integer(2, 8)
    rows = []
    for _ in range(choices.integer(1, 12)):
        cuts = sorted(set(choices.integers(1, length - 1, fewest=0, longest=3)))
        rows.append(tuple(end - start for start, end in itertools.pairwise([0, *cuts, length])))
    return SharesCase(
        rows=tuple(rows),
        data_parallel_size=choices.integer(1, 4),
        microbatches=choices.integer(1, 3),
        seed=choices.integer(0, 1000),
        long=2**24 + 1 if choices.rarely(400) else 0,
    )


def _weight(choices: Choices) -> float:
    return float(choices.integer(1, 9)) if choices.one_of((True, False)) else choices.decimal(0.01, 5)
