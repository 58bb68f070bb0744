"""Hypothesis strategies for data order and for the shares of a global batch."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from equivalence.checks.order import OrderCase
from equivalence.checks.shares import SharesCase


@st.composite
def order_cases(draw: st.DrawFn) -> OrderCase:
    """One source or a blend, in order, shuffled or cyclic, from any step, with every end of an epoch and of a cyclic run."""
    ranks = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["sequential", "shuffle", "megatron-cyclic", "megatron-cyclic-sharded"]))
    is_cyclic = kind.startswith("megatron")
    is_blend = not is_cyclic and draw(st.booleans())
    wraps = is_cyclic or is_blend or draw(st.booleans())
    count = draw(st.integers(1, 5)) if is_blend else 1
    rows = [draw(st.integers(1, 30)) for _ in range(count)]
    steps, consumed_steps = draw(st.integers(1, 12)), draw(st.integers(0, 12)) if wraps else 0
    run_steps = consumed_steps + draw(st.integers(1, 24)) if is_cyclic else None
    weight = st.integers(1, 9).map(float) | st.floats(0.01, 5)
    return OrderCase(
        rows=tuple(rows),
        kind=kind,  # type: ignore[arg-type] # one of them
        last_batch="wrap" if wraps else draw(st.sampled_from(["drop", "stop"])),
        global_batch_size=ranks * draw(st.integers(1, 4)),
        data_parallel_size=ranks,
        seed=draw(st.integers(0, 2**64 - 1)) if kind == "shuffle" else None,
        max_epochs=None if is_blend or is_cyclic else draw(st.sampled_from([None, 1, 3])),
        weights=tuple(draw(weight) for _ in range(count)) if is_blend else None,
        steps=steps,
        consumed_steps=consumed_steps,
        run_steps=run_steps,
    )


@st.composite
def shares_cases(draw: st.DrawFn) -> SharesCase:
    """One to twelve rows of two to eight tokens, whose last global batch is often short of dp."""
    length = draw(st.integers(2, 8))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)))
        rows.append(tuple(end - start for start, end in itertools.pairwise([0, *cuts, length])))
    return SharesCase(
        rows=tuple(rows),
        data_parallel_size=draw(st.integers(1, 4)),
        microbatches=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )
