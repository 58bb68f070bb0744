"""Load a job's YAML into strict frozen dataclasses, and refuse what must not run (docs/spec-setup.md)."""

from production.training.config.checks.machine import check_machine, check_writable, held_checkpoints, missing_packages
from production.training.config.load_job import load
from production.training.config.nemo_rl import without_effect
from production.training.config.plan_job import Plan, plan
from production.training.config.refusal import ConfigRefused, SetupRefused
from production.training.config.schema.data import CHAT, PACKED, Data, DataFile, Dataset, DatasetDefaults
from production.training.config.schema.job import Job, Source
from production.training.config.schema.model import Model
from production.training.config.schema.policy import MegatronCfg, Policy, Scheduler, SequencePacking, Tokenizer
from production.training.config.schema.sections import Checkpointing, Cluster, Logger, Loss, Sft
from production.training.config.settings import (
    chat_settings,
    ddp_options,
    model_settings,
    multi_token_depths,
    optimizer_options,
    order_settings,
    row_settings,
    sizes,
    transformer_options,
)
from production.training.config.show import print_config
from production.training.config.validation import (
    device_here,
    missing_files,
    notes,
    packed_otherwise,
    refusals,
    validate,
)

__all__ = [
    "CHAT", "PACKED", "Checkpointing", "Cluster", "ConfigRefused", "Data", "DataFile", "Dataset", "DatasetDefaults",
    "Job", "Logger", "Loss", "MegatronCfg", "Model", "Plan", "Policy", "Scheduler", "SequencePacking", "SetupRefused",
    "Sft", "Source", "Tokenizer", "chat_settings", "check_machine", "check_writable", "ddp_options", "device_here",
    "held_checkpoints", "load", "missing_files", "missing_packages", "model_settings", "multi_token_depths", "notes",
    "optimizer_options", "order_settings", "packed_otherwise", "plan", "print_config", "refusals", "row_settings",
    "sizes", "transformer_options", "validate", "without_effect",
]  # fmt: skip
