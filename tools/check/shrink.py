"""Shrink a job's layout and model to what at most eight CPU ranks hold, and say what is lost on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equivalence.cases.step import ACTIVATIONS, ModelShape, layout_name
from production.parallel.sizes import ParallelSizes
from production.training.config import Job, multi_token_depths

MOST_RANKS = 8
MOST_DEPTHS = 3
_GROW = ("cp", "tp", "dp", "pp")
"""Dimensions in the order in which ranks that are left over are given to them."""
_MODELLED = {"num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "mtp_num_layers"}
"""Options of megatron-core's that the small model has."""


@dataclass(frozen=True, kw_only=True)
class SmallLayout:
    """A layout of at most eight ranks."""

    sizes: ParallelSizes
    data_size: int

    @property
    def name(self) -> str:
        """Return its sizes above 1, in words."""
        return layout_name(self.sizes, self.data_size)


def small_layouts(sizes: ParallelSizes, data_size: int) -> list[SmallLayout]:
    """Return the job's layout where eight ranks hold it; else one or two in which each dimension above 1 is above 1.

    Experts are whole (etp 1), since gloo gathers no uneven shares. Eight ranks hold three dimensions above 1. With all four (tp, cp, pp, dp) two layouts share them out.
    """
    real = {"tp": sizes.tensor, "cp": sizes.context, "pp": sizes.pipeline, "dp": data_size}
    if math.prod(real.values()) <= MOST_RANKS:
        return [SmallLayout(sizes=dataclasses.replace(sizes, expert_tensor=1), data_size=data_size)]
    large = [name for name, size in real.items() if size > 1]
    groups = [large] if len(large) <= 3 else [["tp", "cp", "pp"], ["cp", "pp", "dp"]]
    return [_small(group, real, sizes) for group in groups]


def _small(group: Sequence[str], real: Mapping[str, int], sizes: ParallelSizes) -> SmallLayout:
    small = {name: 2 if name in group else 1 for name in real}
    while True:
        room = [
            name
            for name in _GROW
            if name in group and 2 * small[name] <= real[name] and 2 * math.prod(small.values()) <= MOST_RANKS
        ]
        if not room:
            break
        # The dimension that was shrunk most.
        small[max(room, key=lambda name: real[name] / small[name])] *= 2
    of_experts = small["tp"] * small["cp"] * small["dp"]
    expert = math.gcd(2, of_experts) if sizes.expert > 1 else 1
    return SmallLayout(
        sizes=ParallelSizes(
            tensor=small["tp"],
            context=small["cp"],
            pipeline=small["pp"],
            expert=expert,
        ),
        data_size=small["dp"],
    )


def small_shape(job: Job, layout: SmallLayout, vocabulary: int) -> tuple[ModelShape, list[str]]:
    """Return a small model of the job's kind for a layout, with `vocabulary` ids at least, and what it lacks of the job's model."""
    model, sizes = job.model, layout.sizes
    lacks: list[str] = []
    if job.megatron.expert_tensor_parallel_size > 1:
        lacks.append(
            "expert tensor parallelism: CPU ranks cannot gather tokens of uneven shares, so each expert was whole"
        )
    depths = multi_token_depths(job)
    if depths > MOST_DEPTHS:
        lacks.append(f"{depths} depths of multi-token prediction ran as {MOST_DEPTHS}")
        depths = MOST_DEPTHS
    is_hybrid = model.architecture == "hybrid"
    pattern = _pattern(model.hybrid_layer_pattern or "", sizes.pipeline, lacks) if is_hybrid else ""
    has_experts = "E" in pattern if is_hybrid else model.num_moe_experts is not None
    layers = sizes.pipeline * (2 if sizes.pipeline <= 2 else 1)
    groups = max(sizes.tensor, 2)
    is_grouped = (model.num_query_groups or model.num_attention_heads or 1) < (model.num_attention_heads or 1)
    heads = groups * (2 if is_grouped else 1)
    experts = max(sizes.expert, 4) if has_experts else 0
    tied = model.tie_embeddings
    if tied and sizes.pipeline > 1 and depths:
        lacks.append("tied embeddings over stages with depths ran untied (docs/findings.md)")
        tied = False
    if model.activation not in ACTIVATIONS:
        lacks.append(f"the activation {model.activation} ran as silu")
    shape = ModelShape(
        architecture=model.architecture,
        layers=layers,
        pattern=pattern,
        hidden_size=4 * heads,
        heads=heads,
        query_groups=groups,
        ffn_hidden_size=16 * max(1, sizes.tensor // 2),
        vocab_size=-(-vocabulary // (4 * sizes.tensor)) * 4 * sizes.tensor,
        gated=model.gated_linear_unit,
        activation=model.activation if model.activation in ACTIVATIONS else "silu",
        tied=tied,
        rotary_percent=1.0 if model.rotary_percent > 0.75 else 0.5,
        experts=experts,
        topk=min(max(model.moe_router_topk, 2), 3) if has_experts else 2,
        dense_layers=_dense_layers(job, layers, lacks) if has_experts and not is_hybrid else 0,
        depths=depths,
        repeated=depths > 0 and job.megatron.mtp_use_repeated_layer,
    )
    return shape, [*lacks, *_other_options(job)]


def _pattern(pattern: str, stages: int, lacks: list[str]) -> str:
    """Return a pattern in which each stage has every kind of layer of the job's that the CPU has, an attention before each."""
    main, *deeper = pattern.split("/")
    letters = dict.fromkeys([*(deeper[0] if deeper else ""), *main])
    if absent := sorted(set(letters) - set("*-E|")):
        lacks.append(f"layers {', '.join(absent)} of the pattern run on CUDA only and were left out")
    kinds = [letter for letter in letters if letter in "-E"] or ["-"]
    return "".join(f"*{kind}" for kind in kinds) * stages


def _dense_layers(job: Job, layers: int, lacks: list[str]) -> int:
    frequency = job.megatron.transformer.get("moe_layer_freq", 1)
    if isinstance(frequency, list | tuple):
        leading = next((at for at, value in enumerate(frequency) if value), len(frequency))
        if not all(frequency[leading:]):
            lacks.append("dense layers between layers of experts ran as leading dense layers")
        return min(1, leading, layers - 1)
    if frequency != 1:
        lacks.append(f"moe_layer_freq {frequency!r} ran as experts in every layer")
    return 0


def _other_options(job: Job) -> list[str]:
    """Return the job's settings of the model that change what it computes and that the small model does not have."""
    model, found = job.model, []
    if model.normalization != "RMSNorm":
        found.append(f"normalization {model.normalization}")
    if model.add_bias_linear:
        found.append("biases")
    if model.hidden_dropout or model.attention_dropout:
        found.append("dropout")
    if model.kv_channels is not None:
        found.append("kv_channels")
    if model.moe_router_topk not in (2, 3) and model.num_moe_experts is not None:
        found.append(f"moe_router_topk {model.moe_router_topk}")
    found += sorted(name for name in job.megatron.transformer if name not in _MODELLED)
    if job.megatron.fp8_cfg.enabled:
        found.append("fp8")
    if job.policy.precision != "float64":
        found.append(f"the precision {job.policy.precision} (steps ran in float64)")
    return [f"the small model had none of: {', '.join(found)}"] if found else []
