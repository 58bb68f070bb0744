"""Hypothesis strategies for training steps: layouts up to eight ranks, model shapes that fit them, uneven rows and masks, and how losses are divided.

Only what can run is drawn: what a layout asks of a shape and its rows is built in, so no draw is thrown away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from equivalence.cases.step import ModelCase, ModelShape, layout_name
from equivalence.generators.draws import each_drawn
from production.parallel.sizes import ParallelSizes

NORMALIZATIONS = ("per_token", "mean_of_means", "global_valid_tokens")
MOST_TOKENS = 64
"""Of a row, where the layout does not need more: attention is quadratic in the reference."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of every dimension."""

    sizes: ParallelSizes
    data_size: int
    """dp."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.sizes.of_a_replica * self.data_size

    @property
    def name(self) -> str:
        """Sizes above 1, in words."""
        return layout_name(self.sizes, self.data_size)


def layouts(world_size: int) -> list[Layout]:
    """Return all layouts of `ranks` ranks (a power of two up to 8) in tp x cp x pp x dp x ep, with sequence parallelism where tp > 1."""
    found = []
    for tensor, context, pipeline, data in itertools.product((1, 2, 4, 8), repeat=4):
        if tensor * context * pipeline * data == world_size:
            for expert in (1, 2, 4, 8):
                if expert * pipeline <= world_size:
                    sizes = ParallelSizes(tensor=tensor, context=context, pipeline=pipeline, expert=expert)
                    found.append(Layout(sizes=sizes, data_size=data))
    return found


@dataclass(frozen=True, kw_only=True)
class Aim:
    """Features of a case that are not left to chance, so that a few cases for each layout cover every kind of model."""

    architecture: str | None = None
    experts: bool | None = None
    depths: tuple[int, ...] = (0, 1, 2, 3)
    witnessed: bool = False
    """Whether Megatron-LM must be able to divide losses so: not `global_valid_tokens`, and depths weighed by rank."""


AIMS = (
    Aim(architecture="gpt", experts=False, depths=(2, 3)),
    Aim(architecture="hybrid", experts=False, depths=(0,)),
    Aim(architecture="gpt", experts=True, depths=(0, 1)),
    Aim(architecture="gpt", experts=False, depths=(1, 2)),
    Aim(architecture="hybrid", experts=True, depths=(0, 1)),
    Aim(architecture="hybrid", experts=False, depths=(1, 2, 3)),
)
"""In turn over a run's cases."""


@st.composite
def shapes(draw: st.DrawFn, layout: Layout, aim: Aim) -> ModelShape:
    """Draw a model that the layout can hold: pp divides layers, tp heads, groups and channels, ep experts."""
    tensor, pipeline, expert = layout.sizes.tensor, layout.sizes.pipeline, layout.sizes.expert
    has_experts = expert > 1 or (draw(st.booleans()) if aim.experts is None else aim.experts)
    architecture = aim.architecture or draw(st.sampled_from(["gpt", "hybrid"]))
    depths = draw(st.sampled_from(aim.depths))
    layers = pipeline * (draw(st.integers(1, 2)) if pipeline <= 2 else 1)
    groups = max(tensor, draw(st.sampled_from([1, 2])))
    heads = groups * draw(st.sampled_from([1, 2]))
    channels = draw(st.sampled_from([2, 4, 4]))
    experts = max(expert, draw(st.sampled_from([2, 4]))) if has_experts else 0
    # megatron-core 0.19.2 cannot name the shards of a tied embedding on a stage of its own with these layers: docs/findings.md.
    may_tie = not (pipeline > 1 and depths)
    return ModelShape(
        architecture=architecture,
        layers=layers,
        pattern=_pattern(pipeline, layers, is_moe=has_experts) if architecture == "hybrid" else "",
        hidden_size=heads * channels,
        heads=heads,
        query_groups=groups,
        ffn_hidden_size=8 * max(1, tensor // 2) * draw(st.sampled_from([1, 2])),
        vocab_size=tensor * draw(st.sampled_from([8, 12])) * (4 // min(tensor, 4)),
        gated=draw(st.booleans()),
        activation=draw(st.sampled_from(["silu", "gelu"])),
        tied=may_tie and draw(st.booleans()),
        rotary_percent=draw(st.sampled_from([1.0, 0.5])) if channels == 4 else 1.0,
        experts=experts,
        topk=draw(st.integers(2, min(3, experts))) if has_experts else 2,
        dense_layers=draw(st.integers(0, layers - 1)) if has_experts and architecture == "gpt" else 0,
        depths=depths,
        repeated=depths > 0 and draw(st.booleans()),
    )


def _pattern(pipeline: int, layers: int, *, is_moe: bool) -> str:
    """Draw a pattern whose stages hold an attention and a layer behind it, so that a depth, made of the first two, attends as well."""
    stage = "*E" if is_moe else "*-"
    return stage * pipeline if layers <= pipeline else (stage + "*-") * pipeline


def domain_factor(sizes: ParallelSizes) -> int:
    """Return the domain factor of a row's length: 2·cp where cp > 1, times tp, whose ranks share the sequence."""
    return (2 * sizes.context if sizes.context > 1 else 1) * sizes.tensor


@st.composite
def rows(draw: st.DrawFn, layout: Layout, *, segment_unit: int, most: int = MOST_TOKENS) -> tuple[tuple[int, ...], ...]:
    """Draw rows of one length: one long segment, many short ones, or in between; one to three microbatches for a data-parallel rank."""
    row_unit = math.lcm(domain_factor(layout.sizes), segment_unit)
    length = row_unit * draw(st.integers(max(1, 16 // row_unit), max(2, most // row_unit)))
    microbatches = draw(st.integers(1, 3 if layout.data_size <= 2 else 2))
    stages = layout.sizes.pipeline
    if stages in (2, 4) and draw(
        st.booleans()
    ):  # the schedule's steady state: it begins behind the first microbatch of each stage
        microbatches = stages + 1
    count = microbatches * layout.data_size
    return tuple(draw(_row(length // segment_unit, segment_unit)) for _ in range(count))


@st.composite
def _row(draw: st.DrawFn, units: int, unit: int) -> tuple[int, ...]:
    kind = draw(st.sampled_from(["some", "one", "many", "some"]))
    if kind == "one":
        return (units * unit,)
    if kind == "many":
        return (unit,) * units
    cuts = draw(st.sets(st.integers(1, units - 1), max_size=4)) if units > 1 else set()
    return tuple(unit * (b - a) for a, b in itertools.pairwise([0, *sorted(cuts), units]))


@st.composite
def model_cases(draw: st.DrawFn, layout: Layout, aim: Aim = Aim()) -> ModelCase:
    """Draw steps for the check `models`."""
    sizes = layout.sizes
    shape = draw(shapes(layout, aim))
    cut = draw(rows(layout, segment_unit=2 * sizes.context if sizes.context > 1 else 1))
    masked = [draw(st.sampled_from([0.5, 0.9, 0.2, 1.0, 0.0])) for _ in cut]
    trained = [draw(st.sampled_from(["anywhere", "anywhere", "first", "last", "share"])) for _ in cut]
    if not any(masked):  # nothing at all is trained: rarely, but it must be drawn
        masked[0] = draw(st.sampled_from([0.0, 0.6, 0.6, 0.6]))
    weights = draw(st.sampled_from(["rank"] if aim.witnessed else ["rank", "rows"]))
    normalizations = [name for name in NORMALIZATIONS if not (aim.witnessed and name == "global_valid_tokens")]
    return ModelCase(
        shape=shape,
        sizes=sizes,
        data_size=layout.data_size,
        rows=cut,
        masked=tuple(masked),
        trained=tuple(
            f"share {number % sizes.context}/{sizes.context}" if where == "share" else where
            for number, where in enumerate(trained)
        ),
        normalization=draw(st.sampled_from(normalizations)),
        mtp_weights=weights,
        mtp=draw(st.sampled_from(["tables", "tables", "upstream_roll"])) if weights == "rank" else "tables",
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@st.composite
def leak_cases(draw: st.DrawFn, layout: Layout, aim: Aim = Aim()) -> ModelCase:
    """Draw steps for the check `leaks`: each segment can be a row alone, so its length is a multiple of the row's domain factor."""
    sizes = layout.sizes
    unit = domain_factor(sizes)
    cut = draw(rows(layout, segment_unit=unit, most=48)) if unit < 16 else ((unit, 2 * unit),) * layout.data_size
    # Few of them: each becomes a row of its own.
    cut = tuple((*row[:3], sum(row[3:])) if len(row) > 4 else row for row in cut[: layout.data_size])
    if max(map(len, cut)) < 2:  # one segment alone has nothing to leak into
        cut = tuple((unit, sum(row)) for row in cut)
    return ModelCase(
        shape=draw(shapes(layout, aim)),
        sizes=sizes,
        data_size=layout.data_size,
        rows=cut,
        masked=tuple(draw(st.sampled_from([0.5, 0.9, 1.0])) for _ in cut),
        normalization=draw(st.sampled_from(NORMALIZATIONS)),
        mtp_weights="rank",
        mtp=draw(st.sampled_from(["tables", "upstream_roll"])),
        seed=draw(st.integers(0, 2**31 - 1)),
        check="leaks",
    )


@st.composite
def path_cases(draw: st.DrawFn, layout: Layout, aim: Aim = Aim()) -> ModelCase:
    """Draw steps for the check `paths`: sequences with their padding, larger at a row's last sequence where stages need one length."""
    sizes = layout.sizes
    factor = domain_factor(sizes)
    unit = factor * (draw(st.sampled_from([1, 3, 4])) if factor <= 4 else 1)
    shape = draw(shapes(layout, aim))
    weights = draw(st.sampled_from(["rank", "rows"])) if shape.depths else "rank"
    cut = draw(rows(layout, segment_unit=unit))
    lengths = []
    for row in cut:
        true = [segment - draw(st.integers(0, unit - 1)) for segment in row]
        if sizes.pipeline > 1 and row[-1] > unit:
            true[-1] = draw(st.integers(1, row[-1]))
        lengths.append(tuple(true))
    masked = [draw(st.sampled_from([0.5, 0.9, 1.0, 0.0])) for _ in cut]
    if not any(masked):  # then nothing is compared but zeros: rarely, but it must be drawn
        masked[0] = draw(st.sampled_from([0.0, 0.6, 0.6, 0.6]))
    return ModelCase(
        shape=shape,
        sizes=sizes,
        data_size=layout.data_size,
        rows=cut,
        masked=tuple(masked),
        normalization="global_valid_tokens",
        mtp_weights=weights,
        mtp=draw(st.sampled_from(["tables", "tables", "upstream_roll"])) if weights == "rank" else "tables",
        seed=draw(st.integers(0, 2**31 - 1)),
        check="paths",
        lengths=tuple(lengths),
        multiple=unit,
    )


STRATEGIES = {"models": model_cases, "leaks": leak_cases, "paths": path_cases}


def draw_cases(check: str, layout: Layout, aim: Aim, *, number: int, examples: int) -> Sequence[ModelCase]:
    """Draw `examples` cases from the seed `number`."""
    found: list[ModelCase] = []
    each_drawn(STRATEGIES[check](layout, aim), found.append, number=number, examples=examples + 1)
    return found[1:]  # the first is the simplest that there is, always


def features(case: ModelCase) -> Iterator[str]:
    """Yield a case's features, by the names in FEATURES; a run counts features and fails if one never occurred."""
    shape, layout = case.shape, case.sizes
    if case.check != "models":
        yield case.check
        if case.check == "paths" and shape.depths:
            yield f"paths with depths, {case.mtp}"
        return
    yield shape.architecture
    yield "experts" if shape.experts else "dense"
    yield "tied" if shape.tied else "untied"
    yield "gated" if shape.gated else "not gated"
    yield shape.activation
    yield f"depths {shape.depths}"
    yield case.normalization
    if shape.repeated and shape.depths > 1:
        yield "repeated"
    if shape.heads > shape.query_groups:
        yield "grouped queries"
    if shape.rotary_percent < 1:
        yield "rotary percent"
    if shape.depths and layout.context > 1:
        yield f"cp, depths weighed by {case.mtp_weights}"
        yield f"cp, {case.mtp}"
    yield from _row_features(case)
    for name, size in (("tp", layout.tensor), ("cp", layout.context), ("pp", layout.pipeline), ("ep", layout.expert)):
        if size > 1:
            yield name
    if case.data_size > 1:
        yield "dp"
    if layout.pipeline > 1 and len(case.rows) > case.data_size * layout.pipeline:
        yield "more microbatches than stages"


def _row_features(case: ModelCase) -> Iterator[str]:
    if 0.0 in case.masked and any(case.masked):
        yield "a row all masked"
    if any(len(row) == 1 for row in case.rows):
        yield "one long segment"
    if any(len(row) >= 6 for row in case.rows):
        yield "many short segments"
    if len(set(case.masked)) > 1:
        yield "uneven microbatches"
    if case.sizes.context > 1 and any(where.startswith("share") for where in case.trained):
        yield "a cp rank's share all masked"
    if case.shape.depths and "first" in case.trained:
        yield "a depth with no target"


FEATURES = (
    *("gpt", "hybrid", "experts", "dense", "tied", "untied", "gated", "not gated", "silu", "gelu"),
    *("depths 0", "depths 1", "depths 2", "depths 3", "repeated", "grouped queries", "rotary percent"),
    *NORMALIZATIONS,
    *("cp, depths weighed by rank", "cp, depths weighed by rows", "cp, tables", "cp, upstream_roll"),
    *("a row all masked", "one long segment", "many short segments", "uneven microbatches"),
    *("a cp rank's share all masked", "a depth with no target", "more microbatches than stages"),
    *("tp", "cp", "pp", "dp", "ep", "leaks", "paths", "paths with depths, tables", "paths with depths, upstream_roll"),
)
"""Features that must occur in a whole run."""
VARIES = "the layout changes the gradient"
"""Features that `invariance` counts where they occur (R-LOSS-3, R-LOSS-6); they must occur in a whole run too."""
