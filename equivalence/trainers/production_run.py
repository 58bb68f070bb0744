"""A run of some steps in one layout: production's engine from a job's configuration, as a world of workers trains it, and what each rank ends up with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from equivalence.cases.step import ModelCase
from equivalence.errors import CaseError
from equivalence.trainers.production_step import Part
from equivalence.workers.worker import Worker
from production.parallel.sizes import RankCoordinates
from production.rows.batch import Batch
from production.training.metrics.step_numbers import StepNumbers
from reference.trainer import Schedule, Settings

SCHEMA = 1
"""Raised when a saved case can no longer be read as it was meant."""
TRAIN = "equivalence.trainers.production_run:train"
STEPS = 20
REPORT_PERIOD = 3
"""Steps between reports: metrics of several steps wait together, and the last report has fewer."""


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A run: the model, layout and rows of a case, its tokens drawn again for each step, and how it is trained."""

    model: ModelCase
    """The model; its normalization is `per_token` or `global_valid_tokens`, and depths have `mtp_weights` `rows`, so that every layout trains the same."""
    schedule: Schedule
    steps: int = STEPS
    precision: str = "float64"
    """`float64` or `float32`."""
    is_distributed: bool = False
    """Whether the optimizer's state is shared over the data-parallel ranks; only in float32."""
    clip_gradient: float = 0.0
    """0: not clipped, as it must be in float64."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    note: str = ""
    """Reason for saving the case."""
    origin: str = ""
    """The job that it comes from."""

    @property
    def stem(self) -> str:
        """Return the beginning of the file's name: precision and layout."""
        return f"{self.precision} {self.model.layout}"

    def to_json(self) -> str:
        """Return the case as JSON, with one field on each line and without fields at their default."""
        found: dict[str, Any] = {"schema": SCHEMA}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, ModelCase):
                value = json.loads(value.to_json())
            elif isinstance(value, Schedule):
                value = {key: now for key, now in dataclasses.asdict(value).items() if now is not None}
            if value != each.default:
                found[each.name] = value
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        return f"{{\n{lines}\n}}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "the case") -> TrainingCase:
        """Read a case. CaseError names `where` and what is wrong."""
        try:
            read = json.loads(text)
            schema = read.pop("schema")
            read["model"] = ModelCase.from_json(json.dumps(read["model"]), where=where)
            read["schedule"] = Schedule(**read["schedule"])
            case = cls(**read)
        except CaseError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CaseError(
                f"{where} cannot be read as a run of steps: {error!r}; a run needs a model and a schedule"
            ) from error
        if schema != SCHEMA:
            raise CaseError(f"{where} must be a run of schema {SCHEMA}; save the case again")
        return case

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `precision`."""
        return {"float64": torch.float64, "float32": torch.float32}[self.precision]

    def at(self, step: int) -> ModelCase:
        """Return the case of one step: other tokens, targets and masks."""
        return dataclasses.replace(self.model, seed=self.model.seed + step)

    def reference_settings(self) -> Settings:
        """Return settings of the reference's trainer."""
        return Settings(
            schedule=dataclasses.replace(
                self.schedule, rows_per_step=len(self.model.rows), weight_decay_steps=self.steps
            ),
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            clip_gradient=self.clip_gradient,
            normalization=self.model.normalization,
            mtp_weights=self.model.mtp_weights,
            data_parallel_size=self.model.data_size,
            context_parallel_size=self.model.sizes.context,
        )

    def job(self) -> Any:
        """Read and validate the job's configuration as for any other job."""
        from production.training.config import load, validate  # noqa: PLC0415 - megatron-core

        job = load([], [f"{key}={json.dumps(value)}" for key, value in _settings(self).items()])
        validate(job, self.model.world_size, device="cpu")
        return job


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingOutcome:
    """Results of one rank."""

    place: RankCoordinates
    numbers: list[StepNumbers] = field(default_factory=list)
    """Numbers that the training job reports for each step, equal on every rank."""
    weight_decays: list[tuple[float, ...]] = field(default_factory=list)
    """For each step those of all groups that hold a parameter here, without repetition, rising."""
    weights: list[Part] = field(default_factory=list)
    """After the last step, of the parts that count on this rank."""


def train(case: TrainingCase, worker: Worker) -> TrainingOutcome:
    """Run production's engine on this rank of a world that entered `equivalence.trainers.production_step.layout` with the case's sizes."""
    from equivalence.trainers.production_step import forget_other_models  # noqa: PLC0415 - megatron-core
    from production.model.weights import fill, shards  # noqa: PLC0415
    from production.training.engine import Engine  # noqa: PLC0415
    from production.training.metrics.step_metrics import Group, StepMetrics  # noqa: PLC0415

    forget_other_models()
    place: RankCoordinates = worker.entered
    weights = case.model.weights()
    engine = Engine(
        case.job(),
        place,
        vocab_size=case.model.shape.vocab_size,
        prepare=lambda built: fill(built, weights),
    )
    outcome = TrainingOutcome(place=place)
    metrics = StepMetrics(group=Group.of_parallel_state(), depths=engine.settings.depths)
    for number in range(case.steps):
        rows: Sequence[Batch] = case.at(number).rows_of_rank(place.data_rank)
        decays = {group["weight_decay"] for group in engine.optimizer.param_groups if group["params"]}
        _measure(metrics, engine.step(rows), step=number + 1, consumed_samples=(number + 1) * len(case.model.rows))
        outcome.weight_decays.append(tuple(sorted(decays)))
        if (number + 1) % REPORT_PERIOD == 0 or number + 1 == case.steps:
            outcome.numbers.extend(metrics.report())
    for shard in shards(engine.model):
        if shard.is_main:
            part = tuple((each.start, each.stop) for each in shard.part)
            outcome.weights.append(Part(name=shard.name, shape=shard.shape, part=part, values=shard.values.clone()))
    return outcome


def _measure(metrics: Any, stepped: Any, *, step: int, consumed_samples: int) -> None:
    """Give a step to the metrics as the training job does."""
    from production.training.metrics.step_metrics import Timing  # noqa: PLC0415 - megatron-core

    for pair in stepped.report.losses:
        metrics.add_loss(pair[0], pair[1])
    if (sums := stepped.mtp_loss_sums) is not None:
        metrics.add_multi_token(sums, torch.full_like(sums, stepped.microbatches), stepped.mtp_token_sums)
    metrics.end_step(
        step=step,
        learning_rate=stepped.learning_rate,
        gradient_norm=stepped.gradient_norm,
        consumed_samples=consumed_samples,
        timing=Timing(step_seconds=1.0, own_seconds=1.0, data_wait_seconds=0.0),
    )


def _settings(case: TrainingCase) -> dict[str, Any]:
    """Return dotted keys of the job."""
    shape, sizes, schedule = case.model.shape, case.model.sizes, case.schedule
    megatron = "policy.megatron_cfg"
    found: dict[str, Any] = {
        "sft.max_num_steps": case.steps,
        "policy.tokenizer.name": "none",
        "policy.train_global_batch_size": len(case.model.rows),
        "policy.max_total_sequence_length": case.model.pack_length,
        "policy.precision": case.precision,
        "data.train.dataset_name": "megatron_sft_packed",
        "data.train.data_path": "drawn",
        "data.default.megatron_sft_prompt_format": "identity",
        "data.shuffle": False,
        "loss.normalization": case.model.normalization,
        "loss.mtp_weights": case.model.mtp_weights,
        "checkpointing.enabled": False,
        "cluster.device": "cpu",
        "model.architecture": shape.architecture,
        "model.vocab_size": shape.vocab_size,
        "model.hidden_size": shape.hidden_size,
        "model.num_attention_heads": shape.heads,
        "model.num_query_groups": shape.query_groups,
        "model.ffn_hidden_size": shape.ffn_hidden_size,
        "model.gated_linear_unit": shape.gated,
        "model.activation": shape.activation,
        "model.tie_embeddings": shape.tied,
        "model.rotary_percent": shape.rotary_percent,
        f"{megatron}.tensor_model_parallel_size": sizes.tensor,
        f"{megatron}.context_parallel_size": sizes.context,
        f"{megatron}.pipeline_model_parallel_size": sizes.pipeline,
        f"{megatron}.expert_model_parallel_size": sizes.expert,
        f"{megatron}.expert_tensor_parallel_size": sizes.expert_tensor,
        f"{megatron}.mtp_use_repeated_layer": shape.repeated,
        f"{megatron}.optimizer.optimizer": "adam",
        f"{megatron}.optimizer.lr": schedule.max_lr,
        f"{megatron}.optimizer.min_lr": schedule.min_lr,
        f"{megatron}.optimizer.weight_decay": schedule.weight_decay,
        f"{megatron}.optimizer.adam_beta1": case.beta1,
        f"{megatron}.optimizer.adam_beta2": case.beta2,
        f"{megatron}.optimizer.adam_eps": case.epsilon,
        f"{megatron}.optimizer.clip_grad": case.clip_gradient,
        f"{megatron}.optimizer.use_distributed_optimizer": case.is_distributed,
        **{f"{megatron}.scheduler.{key}": value for key, value in _schedule(schedule).items()},
    }
    if shape.architecture == "gpt":
        found |= {"model.num_layers": shape.layers, f"{megatron}.mtp_num_layers": shape.depths}
    else:
        found["model.hybrid_layer_pattern"] = shape.hybrid_layer_pattern(sizes.pipeline)
    if shape.experts:
        found |= {
            "model.num_moe_experts": shape.experts,
            "model.moe_ffn_hidden_size": shape.ffn_hidden_size,
            "model.moe_router_topk": shape.topk,
            f"{megatron}.transformer.moe_router_load_balancing_type": "none",
            f"{megatron}.transformer.moe_aux_loss_coeff": 0.0,
        }
        if shape.architecture == "gpt":
            frequency = [int(layer >= shape.dense_layers) for layer in range(shape.layers)]
            found[f"{megatron}.transformer.moe_layer_freq"] = frequency
    return found


def _schedule(schedule: Schedule) -> dict[str, Any]:
    """Return the section `scheduler`, without keys that have no value."""
    end = schedule.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay
    found = {
        "lr_decay_style": schedule.style,
        "lr_decay_iters": schedule.decay_steps,
        "lr_warmup_iters": schedule.warmup_steps,
        "lr_warmup_init": schedule.init_lr,
        "lr_wsd_decay_style": schedule.last_style,
        "lr_wsd_decay_iters": schedule.last_steps,
        "start_weight_decay": schedule.weight_decay,
        "end_weight_decay": end,
        "weight_decay_incr_style": schedule.weight_decay_style,
    }
    return {key: value for key, value in found.items() if value is not None}
