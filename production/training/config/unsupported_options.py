"""List options that megatron-core accepts and that would train something else here, or fail in building (SPEC
R-SETUP-7, R-SETUP-13).

Only options that turn a part on are listed. Options of a part that is off (`dsa_*`, `tp_comm_*`, `fsdp_*`) have no
effect, as in Megatron-LM. Any other option passes through: megatron-core itself acts on it.
`production.model.model.NOT_BUILT` names what the model lacks. `checks/options.py` makes the refusals from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from production.training.config.megatron_options import Kind

_ZIGZAG = "rows are cut by the per-document zigzag"
_GRAPHS = "CUDA graphs: boundaries differ from row to row, and a graph has one shape"
_FP4 = "fp4: rows are padded for the kernels of bf16 and fp8 only"
_SHARED = "gradients that share a buffer with parameters gathered in mxfp8: the step would have to copy them"
_SHARDS = "weights sharded over further ranks (GTP)"
_CAPTURED = "logged by Megatron-LM's own driver, not here"

UNSUPPORTED_OPTIONS: Mapping[Kind, Mapping[str, str]] = {
    "transformer": {
        "virtual_pipeline_model_parallel_size": "interleaved pipeline stages",
        "overlap_p2p_comm": "interleaved pipeline stages, whose messages alone megatron-core overlaps",
        "use_ring_exchange_p2p": "the ring exchange of a torch built for it",
        "pipeline_model_parallel_comm_backend": "another backend between pipeline stages",
        "num_microbatches_with_partial_activation_checkpoints": "recomputation of some microbatches: its forward step would have to pass it on",
        "tensor_parallel_num_weight_shards": _SHARDS,
        "gtp_weight_remat_size": _SHARDS,
        "expert_tensor_parallel_num_weight_shards": _SHARDS,
        "expert_gtp_weight_remat_size": _SHARDS,
        "tp_comm_overlap": "overlapped tensor parallel communication: nothing here sets up Transformer Engine's buffers for it",
        "use_te_rng_tracker": "Transformer Engine's random states: megatron-core's own are seeded",
        "use_mup": "Maximal Update Parameterization: nothing here gives the optimizer the rates that it wants for each width",
        "init_model_with_meta_device": "models without weights, which only megatron-core's FSDP fills",
        "hybrid_context_parallel": f"hybrid context parallelism: {_ZIGZAG}",
        "hierarchical_context_parallel_sizes": f"hierarchical context parallelism: {_ZIGZAG}",
        "max_seqlen_per_dp_cp_rank": f"hybrid context parallelism: {_ZIGZAG}",
        "cuda_graph_impl": _GRAPHS,
        "enable_cuda_graph": _GRAPHS,
        "external_cuda_graph": _GRAPHS,
        "delay_offload_until_cuda_graph": _GRAPHS,
        "fp4": _FP4,
        "batch_invariant_mode": "kernels that do not depend on the batch: nothing here puts them in",
        "moe_enable_routing_replay": "router replay",
        "moe_token_dropping": "dropping tokens",
        "moe_per_layer_logging": f"auxiliary losses by layer: they are {_CAPTURED}",
        "mtp_standalone": "multi-token depths on a stage of their own",
        "mtp_hybrid_override_pattern": "another pattern for multi-token depths: model.hybrid_layer_pattern says it after each /",
        "qk_clip": "clipping of query and key weights after a step, which Megatron-LM's own driver does",
        "log_max_attention_logit": f"the largest attention score: it is {_CAPTURED}",
    },
    "optimizer": {
        "loss_scale": "a loss scale, which is for fp16: gradients would be divided by it, and no loss multiplied",
        "overlap_param_gather_with_optimizer_step": "interleaved pipeline stages, with which alone parameters are gathered during the step",
        "use_layer_wise_distributed_optimizer": "the layer-wise distributed optimizer, which its checkpoints do not cover",
        "grad_norm_skip_threshold": "skipped steps: the schedule would go on without them",
        "log_num_zeros_in_grad": f"the number of zero gradients: it is {_CAPTURED}",
        "optimizer_cuda_graph": _GRAPHS,
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED,
    },
    "distributed_data_parallel_config": {
        "use_megatron_fsdp": "megatron-core's FSDP: it trains with DDP and the distributed optimizer",
        "use_custom_fsdp": "megatron-core's FSDP: it trains with DDP and the distributed optimizer",
        "num_distributed_optimizer_instances": "several instances of the distributed optimizer: its state is shared over all replicas",
        "fp4_param_gather": _FP4,
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED,
        "delay_wgrad_compute": "delayed weight gradients, which need the 1F1B overlap that is refused",
    },
}
"""Option to the part that the option turns on; refused at any value but megatron-core's default."""

FORBIDDEN_VALUES: Mapping[str, Mapping[str, str]] = {
    "cp_comm_type": {"a2a+p2p": f"hierarchical context parallelism: {_ZIGZAG}"},
    "transformer_impl": {"inference_optimized": "layers for inference: it trains"},
}
"""Options of `transformer` of which only some values are refused."""

ALLOWED_VALUES: Mapping[str, tuple[str, ...]] = {
    "moe_router_load_balancing_type": (
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
        "sinkhorn",
        "quantile_balancing",
        "none",
    ),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
}
"""Options of `transformer` whose values megatron-core itself does not check: it would silently ignore another value."""

NEEDS_TRANSFORMER_ENGINE: Mapping[str, str] = {
    "window_size": "attention with a sliding window",
    "softmax_type": "a softmax with a sink",
    "apply_query_key_layer_scaling": "scores scaled by the layer's number",
    "attention_backend": "a choice of attention kernels",
    "flash_attention_version": "a choice of attention kernels",
    "cross_entropy_fusion_impl": "Transformer Engine's cross entropy",
    "use_te_activation_func": "Transformer Engine's activation functions",
    "use_transformer_engine_op_fuser": "Transformer Engine's fused operations",
    "use_grouped_gemm_for_shared_expert": "grouped products of the shared expert",
    "moe_shared_expert_glu_interleave_size": "interleaved gates of the shared expert",
    "moe_mlp_glu_interleave_size": "interleaved gates of the experts",
    "moe_latent_size": "experts in a latent width",
    "moe_router_fusion": "Transformer Engine's fused router",
    "use_kitchen": "kitchen's quantization",
    "cpu_offloading": "offloading of activations by layer",
}
"""Options of `transformer` that act only in Transformer Engine's modules; torch's modules are used where it is
absent.
"""
RECOMPUTED_BY_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
"""Words of `recompute_modules` for outputs that are discarded and recomputed, which megatron-core does with
Transformer Engine only.
"""

NEEDS_CUDA: Mapping[Kind, Mapping[str, str]] = {
    "transformer": {
        "enable_autocast": "CUDA's autocast",
        "fine_grained_activation_offloading": "offloading of activations between CUDA streams",
        "gradient_accumulation_fusion": "fused accumulation of weight gradients",
    },
    "optimizer": {"optimizer_cpu_offload": "offloading of the optimizer to the CPU"},
    "distributed_data_parallel_config": {"nccl_ub": "NCCL's user buffers"},
}
"""Options that a job on the CPU refuses."""

PACKAGES: Mapping[str, tuple[str, str]] = {
    "gradient_accumulation_fusion": ("fused_weight_gradient_mlp_cuda", "apex with its CUDA extensions"),
    "use_kitchen": ("nvidia_kitchen", "kitchen"),
}
"""Options of `transformer` to the module that each imports on CUDA, and the package of the module."""
