"""Write weights as a checkpoint folder of Megatron-LM, which its `--load` takes: `iter_NNNNNNN` in torch_dist format, and the file that names it.

Beside the weights it holds the arguments that say the model's shape (`--use-checkpoint-args`), the iteration and the rows consumed; neither
optimizer nor random states, which the arguments say too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from production.model.model import ModelSettings
from production.training.checkpoint.megatron_state import metadata, results_in_this_process

TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron-LM looks for the iteration to load."""
VERSION = 3.0
"""Megatron-LM's `checkpoint_version`: of the order of queries, keys and values in one weight."""
_PASSED_ON = (
    "moe_layer_freq", "moe_router_pre_softmax", "moe_grouped_gemm", "moe_shared_expert_intermediate_size",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "moe_latent_size",
    "add_qkv_bias", "rotary_interleaved", "apply_query_key_layer_scaling",
)  # fmt: skip
"""Options of TransformerConfig that `--use-checkpoint-args` reads under the same name."""


def write_folder(
    weights: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any],
    *,
    arguments: argparse.Namespace,
    iteration: int,
    folder: Path,
) -> Path:
    """Write whole weights, by megatron-core's names, below `folder`, which holds nothing yet; return `iter_NNNNNNN`.

    `weights` are whole tensors [each in its own shape and dtype]. `objects` are the further entries of the model by unique key, such as the states of fp8. The folder of the iteration appears whole or not at
    all, and the tracker after it. Call it in a process group of one rank, within the CPU shim where CUDA is absent.
    """
    final = folder / f"iter_{iteration:07d}"
    work = folder / f".{final.name}.writing"
    work.mkdir(parents=True)
    entries: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(name, tensor.contiguous()) for name, tensor in weights.items()
    }
    state = {
        "model": {**entries, **objects},
        "args": arguments,
        "checkpoint_version": VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
    }
    with results_in_this_process():
        dist_checkpointing.save(state, str(work), content_metadata=metadata("dp_reshardable"))
    work.rename(final)
    (folder / TRACKER).write_text(str(iteration), encoding="utf-8")
    return final


def model_arguments(model: ModelSettings, *, iteration: int, consumed_samples: int) -> argparse.Namespace:
    """Return the arguments that Megatron-LM would have written beside the weights of such a model, as far as it reads them again."""
    options = model.transformer
    gelu_is_gated = bool(options.get("gated_linear_unit", False))
    activation = getattr(options.get("activation_func"), "__name__", "gelu")
    groups = options.get("num_query_groups")
    found = {
        "num_layers": options.get("num_layers"),
        "hidden_size": options["hidden_size"],
        "num_attention_heads": options["num_attention_heads"],
        "ffn_hidden_size": options.get("ffn_hidden_size") or 4 * options["hidden_size"],
        "kv_channels": options.get("kv_channels") or options["hidden_size"] // options["num_attention_heads"],
        "group_query_attention": groups is not None,
        "num_query_groups": groups or 1,
        "seq_length": model.max_sequence_length,
        "max_position_embeddings": model.max_sequence_length,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "add_bias_linear": options["add_bias_linear"],
        "swiglu": activation == "silu" and gelu_is_gated,
        "squared_relu": activation == "squared_relu",
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "normalization": options["normalization"],
        "hidden_dropout": options["hidden_dropout"],
        "attention_dropout": options["attention_dropout"],
        "mtp_num_layers": options.get("mtp_num_layers"),
        "mtp_use_repeated_layer": options.get("mtp_use_repeated_layer", False),
        "num_experts": options.get("num_moe_experts"),
        "hybrid_layer_pattern": model.hybrid_layer_pattern,
        "padded_vocab_size": model.vocab_size,
        **{name: options[name] for name in _PASSED_ON if name in options},
    }
    if found["num_experts"] is not None:
        for name in ("moe_router_topk", "moe_token_dispatcher_type"):
            found[name] = options[name]
        found["moe_ffn_hidden_size"] = options.get("moe_ffn_hidden_size") or found["ffn_hidden_size"]
    # One rank's weights, whole; without optimizer and random states, which Megatron-LM then does not look for.
    found |= {f"{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "expert_model", "context")}
    found |= {"ckpt_format": "torch_dist", "no_save_optim": True, "no_save_rng": True}
    found |= {"consumed_train_samples": consumed_samples, "skipped_train_samples": 0, "consumed_valid_samples": 0}
    return argparse.Namespace(**found, iteration=iteration)


def stored_objects(checkpoint: Path) -> dict[str, ShardedObject]:
    """Return the model's entries that are no tensors, such as the states of fp8 in Transformer Engine's layers, by unique key."""
    sharded = load_sharded_metadata(str(checkpoint))
    wanted = {
        name: entry
        for name, entry in sharded.items()
        if isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state")
    }
    if not wanted:
        return {}
    found = dist_checkpointing.load(dict(wanted), str(checkpoint), validate_access_integrity=False)
    for name, entry in wanted.items():
        entry.data = found[name]
    return wanted
