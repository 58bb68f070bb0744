"""A training step in one layout, as a case that a world of workers runs: the model, the rows, and what each rank ends up with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.workers.worker import Worker
from production.batches import Batch, take_rank
from production.parallel import Place, Sizes

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A small model, in the terms that both sides' settings are made from."""

    architecture: str = "gpt"
    """`gpt` or `hybrid`."""
    layers: int = 2
    """Of `gpt`."""
    pattern: str = ""
    """Of `hybrid`, without multi-token prediction: `*` attention, `-` MLP, `E` experts."""
    hidden_size: int = 16
    heads: int = 4
    query_groups: int = 2
    ffn_hidden_size: int = 32
    vocab_size: int = 32
    gated: bool = True
    activation: str = "silu"
    tied: bool = False
    rotary_percent: float = 1.0
    experts: int = 0
    """0: dense."""
    topk: int = 2
    dense_layers: int = 0
    """With experts: how many of the first layers have none."""
    depths: int = 0
    """D, layers of multi-token prediction."""
    repeated: bool = False
    """Whether one layer predicts at every depth."""

    def hybrid_layer_pattern(self, pipeline_size: int) -> str | None:
        """The pattern with its stages and depths; None of `gpt`."""
        if self.architecture == "gpt":
            return None
        per_stage = len(self.pattern) // pipeline_size
        stages = ["".join(some) for some in itertools.batched(self.pattern, per_stage)]
        return "/".join(["|".join(stages), *[self.pattern[:2]] * self.depths])

    def settings(self, sizes: Sizes, pack_length: int) -> Any:
        """production's `ModelSettings`, in float64."""
        from production.model import ModelSettings  # noqa: PLC0415 - megatron-core

        transformer: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "num_query_groups": self.query_groups,
            "ffn_hidden_size": self.ffn_hidden_size,
            "gated_linear_unit": self.gated,
            "activation_func": ACTIVATIONS[self.activation],
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float64,
            "mtp_use_repeated_layer": self.repeated,
        }
        if self.architecture == "gpt":
            transformer |= {"num_layers": self.layers, "mtp_num_layers": self.depths or None}
        if self.experts:
            transformer |= {
                "num_moe_experts": self.experts,
                "moe_router_topk": self.topk,
                "moe_ffn_hidden_size": self.ffn_hidden_size,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
            }
            if self.architecture == "gpt":
                transformer["moe_layer_freq"] = [int(layer >= self.dense_layers) for layer in range(self.layers)]
        return ModelSettings(
            vocab_size=self.vocab_size,
            max_sequence_length=pack_length,
            architecture=self.architecture,  # type: ignore[arg-type] # one of its two
            hybrid_layer_pattern=self.hybrid_layer_pattern(sizes.pipeline),
            tie_embeddings=self.tied,
            rotary_percent=self.rotary_percent,
            transformer=transformer,
        )


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One global batch of one model in one layout."""

    shape: ModelShape = field(default_factory=ModelShape)
    sizes: Sizes = field(default_factory=Sizes)
    rows: tuple[tuple[int, ...], ...]
    """Lengths of the segments of each row of the global batch; all rows have one sum, P."""
    masked: tuple[float, ...]
    """For each row the share of its targets that are trained; 0 leaves none."""
    normalization: str = "per_token"
    mtp_weights: str = "rank"
    mtp: str = "tables"
    seed: int = 0
    """Of tokens, masks and weights."""
    weight_scale: float = 0.2
    """Standard deviation of the weights, but for norms."""

    @property
    def pack_length(self) -> int:
        """P."""
        return sum(self.rows[0])

    def batch(self) -> Batch:
        """The global batch, drawn from the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        count, length = len(self.rows), self.pack_length
        boundaries = [[0, *itertools.accumulate(row)] for row in self.rows]
        ids = torch.randint(0, self.shape.vocab_size, (count, length), generator=generator)
        targets = torch.randint(0, self.shape.vocab_size, (count, length), generator=generator)
        shares = torch.tensor(self.masked)[:, None]
        mask = (torch.rand(count, length, generator=generator) < shares).float()
        widest = max(map(len, boundaries))
        return Batch(
            input_ids=ids,
            target_ids=targets,
            token_mask=mask,
            position_ids=torch.stack([torch.cat([torch.arange(each) for each in row]) for row in self.rows]),
            packed_cu_seqlens=torch.tensor([row + [-1] * (widest - len(row)) for row in boundaries], dtype=torch.int32),
            packed_cu_seqlens_lengths=torch.tensor([len(row) for row in boundaries]),
            packed_max_seqlen=torch.tensor([max(row) for row in self.rows]),
            input_lengths=torch.full((count,), length),
            sample_mask=torch.ones(count),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Some values of one gradient of the whole model."""

    name: str
    shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]
    """From and to, in each dimension."""
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RankOutcome:
    """What one rank ends up with."""

    place: Place
    token_losses: list[list[torch.Tensor]] = field(default_factory=list)
    """For each microbatch its cross entropies [n] at depths 0 to D; empty but on the last stage."""
    reports: list[torch.Tensor] = field(default_factory=list)
    """For each microbatch [sum, trained tokens]; empty but on the last stage."""
    mtp_losses: torch.Tensor | None = None
    """[D], reduced over ranks as megatron-core reports them; None but on the last stage."""
    valid_tokens: float
    gradients: list[Part] = field(default_factory=list)
    """Of the parts that count on this rank."""
    gradient_norm: float = 0.0
    """megatron-core's own, the same on all ranks."""


@contextlib.contextmanager
def layout(sizes: Sizes, worker: Worker) -> Iterator[Place]:
    """What a world enters before its first case: the CPU shim, the parallel state, rolls from tables."""
    del worker
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415 - megatron-core

    from production.device.shim import cpu_shim  # noqa: PLC0415
    from production.multi_token_feed import rolls_from_tables  # noqa: PLC0415
    from production.parallel import parallel  # noqa: PLC0415

    with cpu_shim(), parallel(sizes) as place, rolls_from_tables():
        model_parallel_cuda_manual_seed(1)
        yield place


def run(case: ModelCase, worker: Worker) -> RankOutcome:
    """The step of production on this rank of a world that entered `layout` with the case's sizes."""
    from production.training.step import StepSettings, forward_backward, split_rows, wrap  # noqa: PLC0415 - megatron-core

    place: Place = worker.entered
    settings = StepSettings(
        normalization=case.normalization,  # type: ignore[arg-type] # checked there
        depths=case.shape.depths,
        mtp_weights=case.mtp_weights,  # type: ignore[arg-type]
        mtp=case.mtp,
        verify=True,
    )
    model = wrap(_built(case), settings)
    model.zero_grad_buffer()
    rows = split_rows(take_rank(case.batch(), rank=place.data_rank, size=place.data_size))
    with _token_losses(model) as token_losses:
        report = forward_backward(model, rows, settings, place)
    return outcome(
        model,
        place,
        token_losses=token_losses,
        reports=report.losses,
        valid_tokens=float(report.global_valid_tokens),
        microbatches=len(rows),
    )


def run_baseline(case: ModelCase, worker: Worker) -> RankOutcome:
    """The step of Megatron-LM's own pieces on this rank, with a model of the same weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: PLC0415
    from megatron.core.utils import get_model_config  # noqa: PLC0415

    from equivalence import baseline  # noqa: PLC0415

    place: Place = worker.entered
    built = _built(case)
    get_model_config(built).calculate_per_token_loss = case.normalization == "per_token"
    model = DistributedDataParallel(get_model_config(built), DistributedDataParallelConfig(), built)
    model.zero_grad_buffer()
    rows = baseline_rows(case)[place.data_rank :: place.data_size]
    with _token_losses(model) as token_losses:
        reports = baseline.forward_backward(model, rows, per_token=case.normalization == "per_token")
    valid = sum(float(row["loss_mask"].sum()) for row in baseline_rows(case))
    return outcome(
        model, place, token_losses=token_losses, reports=reports, valid_tokens=valid, microbatches=len(rows)
    )


def baseline_rows(case: ModelCase) -> list[dict[str, torch.Tensor]]:
    """The global batch as SFTDataset and its collation give it, one row to a microbatch."""
    batch = case.batch()
    rows = []
    for row, lengths in enumerate(case.rows):
        boundaries = [0, *itertools.accumulate(lengths)]
        filled = boundaries + [case.pack_length] * (case.pack_length + 1 - len(boundaries))
        rows.append(
            {
                "tokens": batch.input_ids[row : row + 1],
                "labels": batch.target_ids[row : row + 1],
                "loss_mask": batch.token_mask[row : row + 1],
                "position_ids": batch.position_ids[row : row + 1],
                "cu_seqlens": torch.tensor([filled], dtype=torch.int32),
                "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
            }
        )
    return rows


def outcome(
    model: torch.nn.Module,
    place: Place,
    *,
    token_losses: Sequence[list[torch.Tensor]],
    reports: Sequence[torch.Tensor],
    valid_tokens: float,
    microbatches: int,
) -> RankOutcome:
    """What a finished step left on this rank: every rank must ask, since norms and reports are reduced."""
    from production.loss import take_multi_token_losses  # noqa: PLC0415 - megatron-core
    from production.weights import shards  # noqa: PLC0415

    parts = [
        Part(
            name=shard.name,
            shape=shard.shape,
            part=tuple((each.start, each.stop) for each in shard.part),
            values=shard.values.clone(),
        )
        for shard in shards(model, of=lambda parameter: parameter.main_grad)
        if shard.is_main
    ]
    return RankOutcome(
        place=place,
        token_losses=list(token_losses),
        reports=list(reports),
        mtp_losses=take_multi_token_losses(microbatches) if place.is_last_stage else None,
        valid_tokens=valid_tokens,
        gradients=parts,
        gradient_norm=gradient_norm(model),
    )


def gradient_norm(model: torch.nn.Module) -> float:
    """megatron-core's norm of the finished gradients over all ranks, as its optimizers compute it before they clip."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415 - megatron-core

    config = OptimizerConfig(optimizer="sgd", lr=0.0, params_dtype=torch.float64)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def gradients(outcomes: Sequence[RankOutcome]) -> dict[str, torch.Tensor]:
    """The whole model's gradients by name, from the parts of all ranks."""
    from production.weights import put_together  # noqa: PLC0415 - megatron-core

    parts: dict[str, list[Any]] = {}
    for each in outcomes:
        for part in each.gradients:
            place = tuple(slice(*bounds) for bounds in part.part)
            parts.setdefault(part.name, []).append((part.shape, place, part.values))
    return put_together(parts)


def _built(case: ModelCase) -> torch.nn.Module:
    from production.model import build_model  # noqa: PLC0415 - megatron-core
    from production.weights import drawn, fill  # noqa: PLC0415

    model = build_model(case.shape.settings(case.sizes, case.pack_length), case.sizes)
    fill(model, drawn(case.seed, scale=case.weight_scale))
    return model


@contextlib.contextmanager
def _token_losses(model: torch.nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Collects the cross entropies of every microbatch, depth by depth: the model computes those of depths 1 to D first."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper  # noqa: PLC0415

    from production.weights import unwrap  # noqa: PLC0415 - megatron-core

    # megatron-core adds multi-token losses up in one place of the process, sized for the first model that ran there.
    MTPLossLoggingHelper.tracker.clear()
    inner = unwrap(model)
    upstream = inner.compute_language_model_loss
    depths = inner.config.mtp_num_layers or 0
    calls: list[torch.Tensor] = []
    found: list[list[torch.Tensor]] = []

    def compute(*args: Any, **options: Any) -> torch.Tensor:
        losses: torch.Tensor = upstream(*args, **options)
        calls.append(losses.detach().reshape(-1).clone())
        if len(calls) == depths + 1:
            found.append([calls[-1], *calls[:-1]])
            calls.clear()
        return losses

    inner.compute_language_model_loss = compute
    try:
        yield found
    finally:
        del inner.compute_language_model_loss
