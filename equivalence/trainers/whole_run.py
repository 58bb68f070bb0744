"""Define a whole run of the training job as a case: its files, its configuration, and the reports of two ranks when the run is stopped and resumed.

The whole job passes through `production.training.trainer.run`: files, loader with its workers, order, engine, metrics, validation,
checkpoint, resume, log.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from equivalence.cases.step import layout_name
from equivalence.generators import tokenizers
from equivalence.trainers.production_step import Part
from equivalence.workers.worker import Worker
from production.parallel.sizes import ParallelSizes
from reference.trainer import Schedule, Settings

TRAIN = "equivalence.trainers.whole_run:train"
PATHS = ("direct", "online")
TOKENIZER = "word"
PROMPT_FORMAT = "nemotron-nano-v2"
VOCABULARY = 112
"""Ids of `word`."""
PACK_LENGTH = 40
"""P; online the length from which a conversation is too long."""
BIN_TOKENS = 64
"""Capacity of a bin of the online path: most conversations have 20 to 40 tokens, so that bins hold one or two."""
LAYERS = 1
DEPTHS = 2
EXPERTS = 4
BALANCE = 0.05
"""`moe_aux_loss_coeff`: so large that a wrong scale of the loss moves each gradient by more than rounding does."""
MULTIPLE = 4
"""Multiple to which each sequence of the online path is padded."""
PACKER = "first_fit_decreasing"
UNANSWERED = 0.2
"""Share of packed rows without an answer: such a row's share has no target at any depth."""
WEIGHTS = (0.7, 0.3)
"""Of the two files that the direct path blends."""
GLOBAL_BATCH = {"direct": 4, "online": 6}
ROWS = {"direct": (7, 5), "online": (17,)}
"""Rows of each training file: no multiple of a global batch, and fewer than the run takes."""
VALIDATION_ROWS = {"direct": 5, "online": 9}
"""Of which the last global batch is short, and dp does not divide it."""
VALIDATION_PERIOD = 3
VALIDATION_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """A run of the training job on one path, in one layout."""

    path: str
    """One of PATHS."""
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    data_size: int = 2
    """dp."""
    seed: int = 0
    """Of the contents, the order of rows and the weights."""
    steps: int = 6
    stop_after: int = 3
    """A signal in this step ends the first part of the run; another process would go on from its checkpoint."""
    workers: tuple[int, int] = (2, 0)
    """Loader processes before and after that."""
    report_period: int = 1
    """Steps between reports."""
    mtp_weights: str = "rank"
    """Tokens by which a depth is weighted: those of the `rank`, or of the `rows` (R-LOSS-6)."""
    is_distributed: bool = False
    """True for megatron-core's distributed optimizer, which has no float64: the run is then in float32."""

    @property
    def precision(self) -> str:
        """Name of the dtype that the model computes in."""
        return "float32" if self.is_distributed else "float64"

    @property
    def dtype(self) -> torch.dtype:
        """That dtype."""
        return torch.float32 if self.is_distributed else torch.float64

    @property
    def is_direct(self) -> bool:
        """True if rows are packed ahead of time."""
        return self.path == "direct"

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.sizes.of_a_replica * self.data_size

    @property
    def layout(self) -> str:
        """Path and sizes above 1, in words."""
        weights = ", depths weighed by rows" if self.mtp_weights == "rows" else ""
        optimizer = ", distributed optimizer" if self.is_distributed else ""
        return f"{self.path} {layout_name(self.sizes, self.data_size)}{weights}{optimizer}"

    @property
    def global_batch_size(self) -> int:
        """G: rows, online conversations."""
        return GLOBAL_BATCH[self.path]

    @property
    def schedule(self) -> Schedule:
        """Cosine with warm-up, and a weight decay that grows to the last step, so that no two steps have the same rate or decay."""
        return Schedule(
            max_lr=2e-2, min_lr=1e-3, init_lr=2e-3, warmup_steps=2, decay_steps=self.steps + 2, style="cosine",
            weight_decay=0.05, end_weight_decay=0.5, weight_decay_style="cosine", weight_decay_steps=self.steps,
            rows_per_step=self.global_batch_size,
        )  # fmt: skip

    def reference_settings(self) -> Settings:
        """Return settings of the reference's trainer."""
        return Settings(
            schedule=self.schedule,
            beta1=0.9,
            beta2=0.95,
            mtp_weights=self.mtp_weights,
            normalization="per_token" if self.is_direct else "global_valid_tokens",
            data_parallel_size=self.data_size,
            context_parallel_size=self.sizes.context,
            is_online=not self.is_direct,
        )

    def training_files(self, folder: Path) -> list[Path]:
        """Return the files of the training rows."""
        return [folder / f"{self.path}-{number}.jsonl" for number in range(len(ROWS[self.path]))]

    def validation_file(self, folder: Path) -> Path:
        """Return the file of the validation rows."""
        return folder / f"{self.path}-validation.jsonl"

    def write_files(self, folder: Path) -> None:
        """Write the files; contents are drawn, and no two rows are equal."""
        draw = random.Random(self.seed)  # noqa: S311 - not for secrets
        files = [*zip(self.training_files(folder), ROWS[self.path], strict=True)]
        for path, rows in (*files, (self.validation_file(folder), VALIDATION_ROWS[self.path])):
            lines = [json.dumps({"messages": _row(draw, is_packed=self.is_direct)}) + "\n" for _ in range(rows)]
            path.write_text("".join(lines), encoding="utf-8")

    def settings(self, folder: Path, *, part: int) -> dict[str, Any]:
        """Return dotted keys of the job, for its first part (0) or its resumed part (1)."""
        return _settings(self, folder, part)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A line of the job's log."""

    kind: str
    step: int
    values: dict[str, Any]


def logged(case: RunCase, folder: Path) -> list[Record]:
    """Return the lines of the run's log, of both parts."""
    text = (folder / f"{case.path}-logs" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.split("\n") if line]
    for line in lines:
        del line["time"]  # of the clock, which nothing is compared with
    return [Record(kind=line.pop("kind"), step=line.pop("step"), values=line) for line in lines]


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOutcome:
    """Observations of one rank during one part of a run."""

    rank: int
    data_rank: int
    """Of dp."""
    step: int
    """Steps taken since the beginning of the job."""
    reason: str
    """Reason for which this part ended."""
    numbers: dict[int, dict[str, float | int | bool]]
    """By step the reported values, as loggers receive them."""
    rates: dict[int, set[float]]
    """By step the learning rates that it was taken with, of all groups of parameters."""
    decays: dict[int, set[float]]
    """By step the weight decays of the groups that hold a parameter here."""
    counted: dict[int, set[int]]
    """By step the steps that Adam had counted before it, of all parameters whose state this rank holds."""
    fed: dict[int, list[list[int]]]
    """By step the tokens of each of this rank's rows, online of each bin's sequences, end to end."""
    validated: list[list[list[int]]]
    """The same for each global batch of each validation, in order."""
    begun: list[Part]
    """This rank's weights before the first step of this part."""
    weights: list[Part]
    """And after its last."""


def train(payload: tuple[RunCase, str], worker: Worker) -> list[RunOutcome]:
    """Run the job on this rank, stop it by a signal that one rank alone gets, and go on from its checkpoint."""
    case, folder = payload
    return [_part(case, Path(folder), part, worker) for part in (0, 1)]


def _part(case: RunCase, folder: Path, part: int, worker: Worker) -> RunOutcome:
    from equivalence.trainers.production_step import forget_other_models  # noqa: PLC0415 - megatron-core
    from production.training.config import load  # noqa: PLC0415
    from production.training.trainer import run  # noqa: PLC0415

    forget_other_models()
    job = load([], [f"{key}={json.dumps(value)}" for key, value in case.settings(folder, part=part).items()])
    seen = _Seen(
        first_step=1 + part * case.stop_after, stop_in=0 if part else case.stop_after, is_told=worker.rank == 0
    )
    with seen.watching():
        outcome = run(job)
    return RunOutcome(
        rank=worker.rank,
        data_rank=seen.data_rank,
        step=outcome.step,
        reason=outcome.reason,
        numbers={each.step: each.values() for each in outcome.numbers},
        rates=seen.rates,
        decays=seen.decays,
        counted=seen.counted,
        fed=seen.fed,
        validated=seen.validated,
        begun=seen.begun,
        weights=seen.weights,
    )


class _Seen:
    """Watches the engine of a job: what it is fed, with which rates and decays, which weights it begins and ends with."""

    def __init__(self, *, first_step: int, stop_in: int, is_told: bool) -> None:
        """`stop_in` is the step in which this process is sent SIGTERM if it `is_told`; 0 for no signal."""
        self._next, self._stop_in, self._is_told = first_step, stop_in, is_told
        self.data_rank = 0
        self.rates: dict[int, set[float]] = {}
        self.decays: dict[int, set[float]] = {}
        self.counted: dict[int, set[int]] = {}
        self.fed: dict[int, list[list[int]]] = {}
        self.validated: list[list[list[int]]] = []
        self.begun: list[Part] = []
        self.weights: list[Part] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that notes an engine's steps and evaluations before they run."""
        from production.training.engine import Engine  # noqa: PLC0415 - megatron-core

        step, evaluate = Engine.step, Engine.evaluate

        def stepped(engine: Any, batches: Sequence[Any]) -> Any:
            self._note(engine, batches)
            done = step(engine, batches)
            self.weights = _weights(engine)
            return done

        def evaluated(engine: Any, batches: Sequence[Any]) -> Any:
            self.validated.append([_tokens(each) for each in batches])
            return evaluate(engine, batches)

        with mock.patch.multiple(Engine, step=stepped, evaluate=evaluated):
            yield

    def _note(self, engine: Any, batches: Sequence[Any]) -> None:
        if not self.begun:
            self.begun, self.data_rank = _weights(engine), engine.place.data_rank
        groups = [group for group in engine.optimizer.param_groups if group["params"]]
        self.rates[self._next] = {group["lr"] for group in groups}
        self.decays[self._next] = {group["weight_decay"] for group in groups}
        self.counted[self._next] = _counted(engine.optimizer)
        self.fed[self._next] = [_tokens(each) for each in batches]
        if self._next == self._stop_in and self._is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        self._next += 1


def _tokens(microbatch: Any) -> list[int]:
    """Return the ids of a row of the direct path, or of a bin's sequences without their padding."""
    from production.rows.batch import Batch  # noqa: PLC0415 - megatron-core

    if isinstance(microbatch, Batch):
        return list(microbatch.input_ids.reshape(-1).tolist())
    lengths = microbatch.input_lengths.tolist()
    return [token for ids, length in zip(microbatch.input_ids, lengths, strict=True) for token in ids[:length].tolist()]


def _counted(optimizer: Any) -> set[int]:
    """Return the step counts of torch's Adam; a parameter without a state has taken no step."""
    from production.training.checkpoint.megatron_state import single_optimizers  # noqa: PLC0415 - megatron-core

    adams = [each.optimizer for each in single_optimizers(optimizer)]
    return {
        int(adam.state[parameter]["step"]) if adam.state.get(parameter) else 0
        for adam in adams
        for group in adam.param_groups
        for parameter in group["params"]
    }


def _weights(engine: Any) -> list[Part]:
    from production.model.weights import shards  # noqa: PLC0415 - megatron-core

    return [
        Part(
            name=shard.name,
            shape=shard.shape,
            part=tuple((each.start, each.stop) for each in shard.part),
            values=shard.values.detach().clone(),
        )
        for shard in shards(engine.model)
        if shard.is_main
    ]


def _row(draw: random.Random, *, is_packed: bool) -> list[dict[str, str]]:
    """Draw one to three conversations: some rows cannot hold all of them, and some have no answer; online they fit a bin and may begin with an answer."""
    if not is_packed:
        question, answer = ({"role": role, "content": _words(draw, 1, 8)} for role in ("user", "assistant"))
        return [answer, question, answer] if draw.random() < 0.25 else [question, answer]
    messages: list[dict[str, str]] = []
    if draw.random() < UNANSWERED:
        return [{"role": "system", "content": ""}, {"role": "user", "content": _words(draw, 1, 3)}]
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "system", "content": ""})
        for _ in range(draw.randint(1, 2)):
            messages.append({"role": "user", "content": _words(draw, 1, 3)})
            messages.append({"role": "assistant", "content": _words(draw, 1, 5)})
    return messages


def _words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(tokenizers.WORDS) for _ in range(draw.randint(least, most)))


def _settings(case: RunCase, folder: Path, part: int) -> dict[str, Any]:
    megatron, schedule, sizes = "policy.megatron_cfg", case.schedule, case.sizes
    files = [str(path) for path in case.training_files(folder)]
    blended = [{"path": path, "weight": weight} for path, weight in zip(files, WEIGHTS, strict=False)]
    kind = "megatron_sft_packed" if case.is_direct else "openai_format"
    return {
        "sft.max_num_steps": case.steps,
        "sft.max_num_epochs": None,
        "sft.seed": case.seed,
        "sft.val_at_start": True,
        "sft.val_period": VALIDATION_PERIOD,
        "sft.val_global_batch_size": VALIDATION_BATCH,
        "policy.tokenizer.name": str(tokenizers.folder(TOKENIZER)),
        "policy.train_global_batch_size": case.global_batch_size,
        "policy.max_total_sequence_length": PACK_LENGTH if case.is_direct else BIN_TOKENS,
        "data.max_input_seq_length": None if case.is_direct else PACK_LENGTH,
        "policy.precision": case.precision,
        "policy.make_sequence_length_divisible_by": MULTIPLE,
        "policy.sequence_packing.enabled": not case.is_direct,
        "policy.sequence_packing.algorithm": PACKER,
        "data.train": {"dataset_name": kind, "data_path": blended if case.is_direct else files},
        "data.validation": {"dataset_name": kind, "data_path": str(case.validation_file(folder))},
        "data.default.megatron_sft_prompt_format": PROMPT_FORMAT,
        "data.shuffle": True,
        "data.seed": case.seed,
        "data.last_batch": "wrap" if case.is_direct else "drop",
        "data.num_workers": case.workers[part],
        "data.cache_folder": str(folder / "index"),
        "loss.mtp_weights": case.mtp_weights,
        "loss.normalization": case.reference_settings().normalization,
        "checkpointing.checkpoint_dir": str(folder / f"{case.path}-checkpoints"),
        "logger.log_dir": str(folder / f"{case.path}-logs"),
        "logger.tensorboard_enabled": False,
        "logger.progress": False,
        "logger.report_period": case.report_period,
        "cluster.device": "cpu",
        "model.num_layers": LAYERS,
        "model.hidden_size": 8,
        "model.num_attention_heads": 2,
        "model.num_query_groups": 2,
        "model.ffn_hidden_size": 16,
        "model.gated_linear_unit": True,
        "model.activation": "silu",
        "model.hidden_dropout": 0.0,
        "model.num_moe_experts": EXPERTS,
        "model.moe_ffn_hidden_size": 8,
        "model.moe_router_topk": 2,
        f"{megatron}.tensor_model_parallel_size": sizes.tensor,
        f"{megatron}.context_parallel_size": sizes.context,
        f"{megatron}.pipeline_model_parallel_size": sizes.pipeline,
        f"{megatron}.expert_model_parallel_size": sizes.expert,
        f"{megatron}.mtp_num_layers": DEPTHS,
        f"{megatron}.mtp_use_repeated_layer": True,
        f"{megatron}.transformer.init_method_std": 0.25,  # scores of a router that are all alike choose by rounding
        f"{megatron}.transformer.moe_router_load_balancing_type": "aux_loss",
        f"{megatron}.transformer.moe_aux_loss_coeff": BALANCE,
        f"{megatron}.optimizer.optimizer": "adam",
        f"{megatron}.optimizer.use_distributed_optimizer": case.is_distributed,
        f"{megatron}.optimizer.lr": schedule.max_lr,
        f"{megatron}.optimizer.min_lr": schedule.min_lr,
        f"{megatron}.optimizer.weight_decay": schedule.weight_decay,
        f"{megatron}.optimizer.adam_beta1": 0.9,
        f"{megatron}.optimizer.adam_beta2": 0.95,
        f"{megatron}.optimizer.adam_eps": 1e-8,
        f"{megatron}.optimizer.clip_grad": 0.0,
        f"{megatron}.scheduler.lr_decay_style": schedule.style,
        f"{megatron}.scheduler.lr_decay_iters": schedule.decay_steps,
        f"{megatron}.scheduler.lr_warmup_iters": schedule.warmup_steps,
        f"{megatron}.scheduler.lr_warmup_init": schedule.init_lr,
        f"{megatron}.scheduler.start_weight_decay": schedule.weight_decay,
        f"{megatron}.scheduler.end_weight_decay": schedule.end_weight_decay,
        f"{megatron}.scheduler.weight_decay_incr_style": schedule.weight_decay_style,
    }  # fmt: skip
