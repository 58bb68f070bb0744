"""Translate the arguments of a Megatron-LM run to the keys of a job; every argument is translated, refused by name, or
listed as without effect.
"""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any

from production.tokens.folder import folder_fault
from production.training.config.megatron_options import option_defaults
from production.training.data.tokenizer import rows_needed
from tools.from_megatron_lm.arguments import BOTH, FILLED_IN, ONLY_ONE, PASSED_ON, REFUSED, SILENT, WITHOUT_EFFECT
from tools.from_megatron_lm.job_yaml import Line, Translation
from tools.from_megatron_lm.reading import Arguments, defaults, flags

_MEGATRON = "policy.megatron_cfg"
_OPTIMIZER, _SCHEDULER = f"{_MEGATRON}.optimizer", f"{_MEGATRON}.scheduler"
_DDP, _TRANSFORMER = f"{_MEGATRON}.distributed_data_parallel_config", f"{_MEGATRON}.transformer"
_SPLIT = "969, 30, 1"
"""Megatron-LM's own split of --data-path where none is given."""
_WHOLE_SPLITS = ("1", "1,0,0", "100,0,0", "1.0", "1.0,0,0")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ALWAYS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "init_method_std")
"""Options that are written out at their defaults, too: they decide what is trained."""
_OF_OTHER_OPTIMIZERS = ("muon_", "lion_", "sgd_")


def translate(arguments: Arguments) -> Translation:
    """Translate a run's arguments."""
    return _Translator(arguments).run()


class _Translator:
    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._found = Translation()
        self._told: set[str] = set()
        """Arguments that a key, a refusal or a reason names."""

    def run(self) -> Translation:
        for part in (
            self._run_length,
            self._batch,
            self._model,
            self._layout,
            self._optimizer,
            self._schedule,
            self._gradients,
        ):
            part()
        for part in (self._data, self._validation, self._checkpoints, self._logs, self._passed_on, self._others):
            part()
        self._launcher()
        self._without_key()
        return self._found

    def _get(self, name: str) -> Any:
        return self._arguments.values.get(name)

    def _put(self, key: str, value: Any, *names: str) -> None:
        """Write a key, with the arguments that say it; of a command line, whether all of them were left out."""
        given = self._arguments.given
        self._told.update(names)
        flags = " ".join(_flag(name) for name in names)
        is_left_out = given is not None and not any(name in given for name in names)
        self._found.lines.append(Line(key=key, value=value, comment=f"{flags} left out" if is_left_out else flags))

    def _refuse(self, name: str, fix: str) -> None:
        self._told.add(name)
        self._found.refused.append((f"{_flag(name)} {_shown(self._get(name))}", fix))

    def _run_length(self) -> None:
        if not self._get("train_iters"):
            self._refuse("train_iters", "give the iterations of the run")
        self._put("sft.max_num_steps", self._get("train_iters"), "train_iters")
        self._put("sft.max_num_epochs", None, "train_iters")
        self._put("sft.seed", self._get("seed"), "seed")
        if not self._get("sft"):
            self._refuse("sft", "only SFT on packed rows is here: give --sft")

    def _batch(self) -> None:
        batch, micro = self._get("global_batch_size"), self._get("micro_batch_size")
        if batch is None:
            self._refuse("global_batch_size", "give it: without it Megatron-LM takes the micro batch of every rank")
        if micro != 1:
            fix = "set it to 1: a row is a microbatch here"
            if not self._get("calculate_per_token_loss"):
                fix += ", and --calculate-per-token-loss, without which another micro batch trains something else"
            self._refuse("micro_batch_size", fix)
        self._put("policy.train_global_batch_size", batch, "global_batch_size")
        self._put("policy.max_total_sequence_length", self._get("seq_length"), "seq_length")
        if self._get("seq_length") is None:
            self._refuse("seq_length", "give the pack length")
        if self._get("fp16"):
            self._refuse("fp16", "train in bf16 or float32")
        self._put("policy.precision", "bfloat16" if self._get("bf16") else "float32", "bf16")
        per_token = bool(self._get("calculate_per_token_loss"))
        self._put("loss.normalization", "per_token" if per_token else "mean_of_means", "calculate_per_token_loss")

    def _model(self) -> None:
        pattern, pattern_name = self._get("hybrid_layer_pattern"), "hybrid_layer_pattern"
        if (older := self._get("hybrid_override_pattern")) is not None:  # Megatron-LM takes it for its successor
            if pattern is not None:
                self._refuse("hybrid_override_pattern", "it is an older name of --hybrid-layer-pattern: give only that")
            pattern, pattern_name = older, "hybrid_override_pattern"
        for name in ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "normalization"):
            if name != "num_layers" or not pattern:
                self._put(f"model.{name}", self._get(name), name)
        groups = self._get("num_query_groups") if self._get("group_query_attention") else None
        self._put("model.num_query_groups", groups, "num_query_groups", "group_query_attention")
        gated, wide = bool(self._get("swiglu")), self._get("ffn_hidden_size")
        if wide is None and gated and self._get("hidden_size"):
            wide = int((4 * self._get("hidden_size") * 2 / 3) / 64) * 64
        self._put("model.ffn_hidden_size", wide, "ffn_hidden_size")
        activation = "silu" if gated else "squared_relu" if self._get("squared_relu") else "gelu"
        self._put("model.activation", activation, "swiglu", "squared_relu")
        self._put("model.gated_linear_unit", gated, "swiglu")
        bias = bool(self._get("add_bias_linear"))
        for name in ("add_bias_linear", "hidden_dropout", "attention_dropout"):
            self._put(f"model.{name}", self._get(name), name)
        fused = self._get("bias_swiglu_fusion") if gated else (self._get("bias_gelu_fusion") and bias)
        self._put(
            f"{_TRANSFORMER}.bias_activation_fusion", bool(fused), "bias_swiglu_fusion" if gated else "bias_gelu_fusion"
        )
        tied = not self._get("untie_embeddings_and_output_weights")
        self._put("model.tie_embeddings", tied, "untie_embeddings_and_output_weights")
        self._positions()
        self._vocabulary()
        if pattern is not None:
            self._put("model.architecture", "hybrid", pattern_name)
            self._put("model.hybrid_layer_pattern", pattern, pattern_name)
        if self._get("num_experts") is not None:
            self._put("model.num_moe_experts", self._get("num_experts"), "num_experts")
            self._put("model.moe_ffn_hidden_size", self._get("moe_ffn_hidden_size") or wide, "moe_ffn_hidden_size")
            self._put("model.moe_router_topk", self._get("moe_router_topk"), "moe_router_topk")
            dispatcher = self._get("moe_token_dispatcher_type")
            self._put(f"{_TRANSFORMER}.moe_token_dispatcher_type", dispatcher, "moe_token_dispatcher_type")
        if self._get("mtp_num_layers"):
            for name in ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer"):
                self._put(f"{_MEGATRON}.{name}", self._get(name), name)
        if self._get("init_method_xavier_uniform"):
            self._refuse("init_method_xavier_uniform", "take it out, or start from a checkpoint (--finetune --load)")

    def _positions(self) -> None:
        kind = "rope" if self._get("use_rotary_position_embeddings") else self._get("position_embedding_type")
        if kind != "rope":
            self._refuse(
                "position_embedding_type",
                "only rope is here; none is --position-embedding-type rope with --no-rope-freq 1",
            )
        self._put("model.rotary_base", int(self._get("rotary_base")), "rotary_base")
        self._put("model.rotary_percent", float(self._get("rotary_percent")), "rotary_percent")

    def _vocabulary(self) -> None:
        padded, size = self._get("padded_vocab_size"), self._get("vocab_size")
        names, why = ["vocab_size", "make_vocab_size_divisible_by"], ""
        if padded is None and size is None:
            size, why = _tokens_of(self._get("tokenizer_model"))
            names[0] = "tokenizer_model"
        if padded is not None:
            names = ["padded_vocab_size"]
        elif size is not None:
            multiple = self._get("make_vocab_size_divisible_by") * self._get("tensor_model_parallel_size")
            padded = math.ceil(size / multiple) * multiple if self._get("pad_vocab_size") else size
        if padded is None:
            fix = f"{why}, so that its number of tokens is not known: give --vocab-size, or the argument dump of a log, which has padded_vocab_size"
            self._refuse("vocab_size", fix)
        self._put("model.vocab_size", padded, *names)

    def _layout(self) -> None:
        tensor = self._get("tensor_model_parallel_size")
        names = (
            "tensor_model_parallel_size",
            "context_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        )
        for name in names:
            self._put(f"{_MEGATRON}.{name}", self._get(name), name)
        if self._get("num_experts") is not None:
            self._put(
                f"{_MEGATRON}.expert_tensor_parallel_size",
                self._get("expert_tensor_parallel_size") or tensor,
                "expert_tensor_parallel_size",
            )
        if tensor > 1:
            self._put(f"{_MEGATRON}.sequence_parallel", bool(self._get("sequence_parallel")), "sequence_parallel")
        for name, option in (
            ("decoder_first_pipeline_num_layers", "first"),
            ("decoder_last_pipeline_num_layers", "last"),
        ):
            if self._get(name) is not None:
                self._put(f"{_TRANSFORMER}.num_layers_in_{option}_pipeline_stage", self._get(name), name)
        types = self._get("cp_comm_type")
        if types not in (None, ["p2p"], "p2p"):
            self._put(
                f"{_TRANSFORMER}.cp_comm_type",
                types[0] if isinstance(types, list) and len(types) == 1 else types,
                "cp_comm_type",
            )
        if self._get("recompute_activations"):
            self._put(f"{_TRANSFORMER}.recompute_granularity", "selective", "recompute_activations")
        if self._get("fp8_param_gather"):
            self._put(f"{_TRANSFORMER}.fp8_param", bool(self._get("fp8_param_gather")), "fp8_param_gather")
        device = "cpu" if self._get("distributed_backend") == "gloo" else "auto"
        self._put("cluster.device", device, "distributed_backend")
        self._put(
            "cluster.timeout_seconds", self._get("distributed_timeout_minutes") * 60, "distributed_timeout_minutes"
        )
        self._put("cluster.deterministic", bool(self._get("deterministic_mode")), "deterministic_mode")

    def _optimizer(self) -> None:
        for name in sorted(PASSED_ON["optimizer"]):
            value, is_always = self._get(name), name in _ALWAYS
            if name.startswith(_OF_OTHER_OPTIMIZERS) and not str(self._get("optimizer")).startswith(
                name.partition("_")[0]
            ):
                continue
            if name == "optimizer_offload_fraction" and not self._get("optimizer_cpu_offload"):
                continue
            value = _DTYPES.get(value, value) if name.endswith("_dtype") else value
            if is_always or _differs(value, option_defaults("optimizer")[name]):
                self._put(f"{_OPTIMIZER}.{name}", value, name)
                if name in BOTH:
                    self._put(f"{_DDP}.{name}", value, name)
        if self._get("lr") is None:
            self._refuse("lr", "give the learning rate")

    def _schedule(self) -> None:
        steps = self._get("lr_decay_iters") or self._get("train_iters")
        fraction = self._get("lr_warmup_fraction")
        warmup = self._get("lr_warmup_iters")
        if fraction is not None:
            exact = fraction * (steps or 0)
            warmup = round(exact)
            if abs(exact - warmup) > 1e-9:
                self._refuse(
                    "lr_warmup_fraction", f"it is {exact:g} iterations: give a whole number as --lr-warmup-iters"
                )
        values = {
            "lr_decay_style": self._get("lr_decay_style"), "lr_decay_iters": steps, "lr_warmup_iters": warmup,
            "lr_warmup_init": self._get("lr_warmup_init"), "weight_decay_incr_style": self._get("weight_decay_incr_style"),
        }  # fmt: skip
        for name, value in values.items():
            extra = ("lr_warmup_fraction",) if name == "lr_warmup_iters" and fraction is not None else ()
            self._put(f"{_SCHEDULER}.{name}", value, *(extra or (name,)))
        if self._get("lr_decay_style") == "WSD":
            for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters"):
                self._put(f"{_SCHEDULER}.{name}", self._get(name), name)
        for name in ("start_weight_decay", "end_weight_decay"):
            value = self._get(name)
            self._put(
                f"{_SCHEDULER}.{name}", self._get("weight_decay") if value is None else value, name, "weight_decay"
            )

    def _gradients(self) -> None:
        wide = self._get("accumulate_allreduce_grads_in_fp32")
        if self._get("bf16") and not self._arguments.is_dump:  # Megatron-LM turns it on for bf16 by itself
            wide = not self._get("grad_reduce_in_bf16") and (wide or self._get("main_grads_dtype") == "fp32")
        self._put(
            f"{_DDP}.grad_reduce_in_fp32", bool(wide), "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"
        )
        others = {
            "ddp_average_in_collective": "average_in_collective", "ddp_num_buckets": "num_buckets", "ddp_bucket_size": "bucket_size",
            "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
            "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
        }  # fmt: skip
        for name, option in others.items():
            if _differs(self._get(name), option_defaults("distributed_data_parallel_config")[option]):
                self._put(f"{_DDP}.{option}", self._get(name), name)

    def _data(self) -> None:
        self._put("policy.tokenizer.name", self._get("tokenizer_model"), "tokenizer_model")
        if self._get("tokenizer_model") is None:
            self._refuse("tokenizer_model", "give the folder of the tokenizer")
        if self._get("tokenizer_type") not in ("SFTTokenizer", None):
            self._refuse("tokenizer_type", "only SFTTokenizer renders packed rows")
        files, name = self._get("train_data_path"), "train_data_path"
        if files is None:
            files, name = self._get("data_path"), "data_path"
            split = self._get("split") or _SPLIT
            if files is not None and split.replace(" ", "") not in _WHOLE_SPLITS:
                fix = "it trains on a part of the rows: write the parts to files, and name them by --train-data-path and --valid-data-path"
                self._found.refused.append((f"--split {split}" + ("" if self._get("split") else " (left out)"), fix))
        if not files:
            self._refuse("train_data_path", "give the packed file")
            return
        self._put("data.train.dataset_name", "megatron_sft_packed", "sft")
        self._put("data.train.data_path", _files(files), name)
        self._put(
            "data.default.megatron_sft_prompt_format",
            self._get("sft_tokenizer_prompt_format"),
            "sft_tokenizer_prompt_format",
        )
        kind = self._get("dataloader_type") or "single"
        orders = {
            "single": "sequential",
            "cyclic": "megatron-cyclic-sharded" if self._get("data_sharding") else "megatron-cyclic",
        }
        if kind not in orders:
            self._refuse("dataloader_type", "give single or cyclic")
        names = ("dataloader_type", "data_sharding") if kind == "cyclic" else ("dataloader_type",)
        self._put("data.order", orders.get(kind), *names)
        self._put("data.last_batch", "wrap", "dataloader_type")
        self._put("data.num_workers", self._get("num_workers"), "num_workers")

    def _validation(self) -> None:
        files, interval, batches = self._get("valid_data_path"), self._get("eval_interval"), self._get("eval_iters")
        if not files or not interval or not batches:
            self._put("sft.val_period", 0, "valid_data_path", "eval_interval", "eval_iters")
            return
        self._put("data.validation.dataset_name", "megatron_sft_packed", "sft")
        self._put("data.validation.data_path", _files(files), "valid_data_path")
        self._put("sft.val_period", interval, "eval_interval")
        self._put("sft.val_batches", batches, "eval_iters")
        if self._get("eval_global_batch_size") is not None:
            self._put("sft.val_global_batch_size", self._get("eval_global_batch_size"), "eval_global_batch_size")
        self._found.notes.append(
            "Megatron-LM goes on in its validation file from one validation to the next; this job begins again at its first rows"
        )

    def _checkpoints(self) -> None:
        folder, loaded = self._get("save"), self._get("load")
        start = loaded if self._get("finetune") else self._get("pretrained_checkpoint")
        self._put("model.initial", "megatron" if start else "scratch", "finetune", "load", "pretrained_checkpoint")
        if start:
            self._put("model.initial_path", start, "load" if self._get("finetune") else "pretrained_checkpoint")
        if loaded and not self._get("finetune") and loaded != folder:
            self._refuse("load", "a run of Megatron-LM's is not gone on with: add --finetune to start from its weights")
        self._put(
            "checkpointing.enabled", folder is not None and bool(self._get("save_interval")), "save", "save_interval"
        )
        if folder is not None and self._get("save_interval"):
            self._put("checkpointing.checkpoint_dir", folder, "save")
            self._put("checkpointing.save_period", self._get("save_interval"), "save_interval")
            self._put("checkpointing.keep_top_k", None, "save")
            self._put("checkpointing.save_optimizer", not self._get("no_save_optim"), "no_save_optim")

    def _logs(self) -> None:
        self._put("logger.report_period", self._get("log_interval"), "log_interval")
        folder = self._get("tensorboard_dir")
        self._put("logger.tensorboard_enabled", folder is not None, "tensorboard_dir")
        if folder is not None:
            self._put("logger.log_dir", folder, "tensorboard_dir")
        if self._get("wandb_project"):
            self._put("logger.wandb_enabled", bool(self._get("wandb_project")), "wandb_project")
            for key, name in (("project", "wandb_project"), ("name", "wandb_exp_name"), ("entity", "wandb_entity")):
                if self._get(name):
                    self._put(f"logger.wandb.{key}", self._get(name), name)

    def _passed_on(self) -> None:
        for kind in ("transformer", "distributed_data_parallel_config"):
            for name in sorted(PASSED_ON[kind]):
                value, default = self._get(name), option_defaults(kind)[name]
                if self._is_filled_in(name):
                    continue
                if (
                    name in _ALWAYS
                    or (_differs(value, default) and _differs(value, defaults()[name]))
                    or name == "attention_softmax_in_fp32"
                ):
                    self._put(f"{_MEGATRON}.{kind}.{name}", _plain(value), name)

    def _others(self) -> None:
        given = self._arguments.given or frozenset()
        for name, fix in REFUSED.items():
            is_away = name in self._arguments.values and _differs(self._get(name), defaults()[name])
            if is_away and not self._is_filled_in(name):
                self._refuse(name, fix)
        for name in ONLY_ONE:
            if self._get(name) not in (None, 1):
                fix = "the job does not have this layout of ranks: take out what makes it more than 1"
                self._found.refused.append((f"{name} {self._get(name)}", fix))
        for name, why in WITHOUT_EFFECT.items():
            if name in given or (name in self._arguments.values and _differs(self._get(name), defaults()[name])):
                self._told.add(name)
                self._found.without_effect.append((_flag(name), why))
        for word in self._arguments.unknown:
            self._found.refused.append(
                (word, "the installed Megatron-LM has no such argument: take it out, or add what it says to the YAML")
            )

    def _is_filled_in(self, name: str) -> bool:
        """Return whether Megatron-LM gave an argument of a dump the value of another one, as it does where nothing is given."""
        return self._arguments.is_dump and name in FILLED_IN and self._get(name) == self._get(FILLED_IN[name])

    def _launcher(self) -> None:
        """Write torchrun's number of ranks; where it is left to the machine (`gpu`, `1:4`), there is no key."""
        said = self._arguments.launcher
        if not said:
            return
        keys = (("nproc_per_node", "gpus_per_node"), ("nnodes", "num_nodes"))
        for name, key in keys:
            flag, value = f"torchrun --{name.replace('_', '-')}", said.get(name, "1")
            if value.isdecimal() and int(value) > 0:
                comment = flag if name in said else f"{flag} left out"
                self._found.lines.append(Line(key=f"cluster.{key}", value=int(value), comment=comment))
            else:
                self._found.without_key.append((f"{flag} {value}", "the number is known only where the run starts"))

    def _without_key(self) -> None:
        """List what a command line gives and nothing else names, so that nothing given goes unmentioned."""
        for name in sorted((self._arguments.given or frozenset()) - self._told):
            value = self._get(name)
            if name in SILENT:
                why = SILENT[name]
            elif name.startswith(_OF_OTHER_OPTIMIZERS):
                why = "the run has another optimizer"
            elif not _differs(value, defaults()[name]):
                why = "it is the default"
            else:
                why = "it is what the job does without it"
            is_bare = value is None or isinstance(value, bool)
            self._found.without_key.append((_flag(name) if is_bare else f"{_flag(name)} {_words(value)}", why))


def _tokens_of(folder: Any) -> tuple[int | None, str]:
    """Return the number of a tokenizer folder's ids, as a job counts them, or else why it is not known."""
    if folder is None:
        return None, "there is no --tokenizer-model"
    if not Path(folder).is_dir():
        return None, f"--tokenizer-model {folder} is not a folder on this machine"
    if (fault := folder_fault(Path(folder))) is not None:
        return None, f"--tokenizer-model {folder} cannot be loaded: {fault}"
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import

    try:
        return rows_needed(AutoTokenizer.from_pretrained(folder, local_files_only=True)), ""
    except Exception as error:  # noqa: BLE001 - a damaged tokenizer.json raises Exception itself
        return (
            None,
            f"--tokenizer-model {folder} cannot be loaded: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        )


def _words(value: Any) -> str:
    value = _plain(value)
    return " ".join(str(each) for each in value) if isinstance(value, list) else str(value)


def _flag(name: str) -> str:
    return flags()[name]


def _differs(value: Any, default: Any) -> bool:
    return bool(_plain(value) != _plain(default))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    return (
        list(value)
        if isinstance(value, tuple)
        else str(value).removeprefix("torch.")
        if type(value).__name__ == "dtype"
        else value
    )


def _files(given: Any) -> Any:
    """Return files as `data_path` takes them: a path, or a blend of weights and paths in turn."""
    words = [given] if isinstance(given, str) else [str(each) for each in given]
    if len(words) == 1:
        return words[0]
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return words
    return [{"path": path, "weight": weight} for path, weight in zip(words[1::2], weights, strict=True)]


def _shown(value: Any) -> str:
    return "left out" if value is None else str(value)
