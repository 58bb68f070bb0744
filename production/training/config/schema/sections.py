"""Declare the smaller sections of a job: length of the run, loss, checkpoints, logs, machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Section `sft`: length of the run and validation."""

    max_num_steps: int | None = None
    """Steps (global batches) at most; None: `max_num_epochs` alone says. The job ends at whichever comes first."""
    max_num_epochs: int | None = 1
    """Passes over the training data at most; None: `max_num_steps` alone says."""
    val_period: int = 0
    """Steps between validations; 0: none on the way."""
    val_batches: int | None = None
    """Global batches of a validation at most; None: the whole validation set."""
    val_global_batch_size: int | None = None
    """Rows of a validation batch; None: derived, `policy.train_global_batch_size`."""
    val_micro_batch_size: int = 1
    """Rows of a validation microbatch; only 1 on the direct path."""
    val_at_start: bool = False
    """Whether to validate before the first step."""
    val_at_end: bool = False
    """Whether to validate after the last step, also where `val_period` does not divide it."""
    seed: int = 42
    """Seed of the weights drawn, of dropout and, unless `data.seed` says otherwise, of the order of rows."""
    only_unmask_final: bool = False
    """NeMo-RL's option to train on the last assistant turn alone; packed rows carry their own masks, so only false."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Section `loss`: the divisor of the summed token losses, and the weights of multi-token depths."""

    name: Literal["NLLLossFn"] = "NLLLossFn"
    """The loss; only the negative log-likelihood of the next token."""
    normalization: Literal["per_token", "mean_of_means", "global_valid_tokens"] = "per_token"
    """`per_token`: the sum over the global batch by its trained tokens, divided after the backward pass. `mean_of_means`: Megatron-LM's default,
    each rank's microbatch by its own tokens. `global_valid_tokens`: the pull request's direct path, divided before the backward pass."""
    mtp_weights: Literal["rank", "rows"] = "rank"
    """Whose trained tokens weigh a multi-token depth: those of the rank's share, as upstream, or of the whole row, invariant under context parallelism."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Section `checkpointing`."""

    enabled: bool = True
    """Whether checkpoints are written."""
    checkpoint_dir: str = "results/sft"
    """Folder of the checkpoints, seen by all ranks."""
    save_period: int = 100
    """Steps between checkpoints; one more is written at the end and on SIGTERM."""
    keep_top_k: int | None = 3
    """Checkpoints kept; None: all. The newest is always kept."""
    metric_name: str | None = None
    """Metric by which the best checkpoints are chosen, such as `val:val_loss`; None: the newest are kept."""
    higher_is_better: bool = False
    """Whether a higher `metric_name` is better."""
    checkpoint_must_save_by: str | None = None
    """Time after the start, `days:hours:minutes:seconds`, at which a checkpoint is written and the job ends cleanly; None: never."""
    save_optimizer: bool = True
    """Whether the state of the optimizer is saved; without it a job cannot be resumed."""
    optimizer_format: Literal["dp_reshardable", "fully_reshardable", "fully_sharded_model_space"] = "dp_reshardable"
    """megatron-core's `sharding_type` of the distributed optimizer; validation refuses those that do not hold for a layout. The plain optimizer needs none."""
    resume: bool = True
    """Whether to go on from the newest checkpoint in `checkpoint_dir`, if there is one."""
    reshard: bool = False
    """Whether a resume may have another number of ranks and another layout, where no number depends on them (docs/checkpoints.md)."""


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Section `logger.wandb`."""

    project: str = "packproof"
    """Project."""
    name: str | None = None
    """Name of the run; None: W&B's own."""
    entity: str | None = None
    """Team or user; None: W&B's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `logger.log_dir` only and needs no login."""


@dataclass(frozen=True, kw_only=True)
class Tensorboard:
    """Section `logger.tensorboard`."""

    log_dir: str = "tensorboard"
    """Folder of the event files, below `logger.log_dir`."""


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """Section `logger.mlflow`."""

    experiment_name: str = "packproof"
    """Experiment."""
    run_name: str | None = None
    """Name of the run; None: MLflow's own."""
    tracking_uri: str | None = None
    """Where runs are kept; None: below `logger.log_dir`."""


@dataclass(frozen=True, kw_only=True)
class Logger:
    """Section `logger`. A JSONL file is always written."""

    log_dir: str = "logs"
    """Folder of all logs, written by rank 0."""
    report_period: int = 1
    """Steps between reports: the only moments at which metrics leave the device."""
    tensorboard_enabled: bool = True
    """Whether TensorBoard's event files are written."""
    wandb_enabled: bool = False
    """Whether to log to W&B (extra `wandb`)."""
    mlflow_enabled: bool = False
    """Whether to log to MLflow (extra `mlflow`)."""
    swanlab_enabled: bool = False
    """NeMo-RL's SwanLab logger: only false."""
    monitor_gpus: bool = False
    """Not read: memory is reported with each step."""
    dump_batch_steps: tuple[int, ...] = ()
    """Steps, from 1, whose batches each rank dumps for `diff_row`; `--dump-batch STEP` adds one."""
    progress: bool = True
    """Whether rank 0 shows a progress bar, or a line a step where there is no terminal. What is saved, passed over or wrong is always told."""
    peak_teraflops: float | None = None
    """Peak of one device in 10^12 operations a second, for MFU; None: from the table by the device's name, and no MFU where it lacks it (R-WORK-3)."""
    wandb: Wandb = Wandb()
    """W&B's options."""
    tensorboard: Tensorboard = Tensorboard()
    """TensorBoard's options."""
    mlflow: Mlflow = Mlflow()
    """MLflow's options."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Section `cluster`. Processes are started by torchrun, never from here."""

    gpus_per_node: int | None = None
    """Processes of a node; None: whatever torchrun started."""
    num_nodes: int | None = None
    """Nodes; None: whatever torchrun started. Where both are set, their product must be the world size that a run has."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is one."""
    timeout_seconds: int = 600
    """Seconds after which a collective that a rank does not join ends the job."""
    deterministic: bool = True
    """Whether torch is held to deterministic algorithms; false lets kernels choose faster ones on CUDA."""

    @property
    def ranks(self) -> int | None:
        """Return the number of all processes; None where this section does not give it."""
        return None if self.num_nodes is None or self.gpus_per_node is None else self.num_nodes * self.gpus_per_node
