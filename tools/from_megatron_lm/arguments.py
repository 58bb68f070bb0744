"""Hold the table of Megatron-LM's arguments: each is translated, passed on to megatron-core, refused, or without effect.

Names are those of the parsed arguments, as the head of a log prints them. The parser is that of megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

_TRANSLATED = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    sequence_parallel num_layers hidden_size num_attention_heads group_query_attention num_query_groups ffn_hidden_size kv_channels
    normalization swiglu squared_relu bias_gelu_fusion bias_swiglu_fusion add_bias_linear hidden_dropout attention_dropout num_experts
    moe_ffn_hidden_size moe_router_topk untie_embeddings_and_output_weights rotary_base rotary_percent position_embedding_type
    use_rotary_position_embeddings hybrid_layer_pattern hybrid_override_pattern padded_vocab_size vocab_size make_vocab_size_divisible_by pad_vocab_size mtp_num_layers
    mtp_loss_scaling_factor mtp_use_repeated_layer seq_length micro_batch_size global_batch_size train_iters seed bf16 fp16 lr_decay_style
    lr_wsd_decay_style lr_decay_iters lr_wsd_decay_iters lr_warmup_fraction lr_warmup_iters lr_warmup_init start_weight_decay end_weight_decay
    weight_decay_incr_style calculate_per_token_loss accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 ddp_average_in_collective
    ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation data_path split
    train_data_path valid_data_path sft sft_tokenizer_prompt_format tokenizer_type tokenizer_model dataloader_type data_sharding num_workers
    eval_iters eval_interval eval_global_batch_size save save_interval no_save_optim load finetune pretrained_checkpoint log_interval
    tensorboard_dir wandb_project wandb_exp_name wandb_entity recompute_activations distributed_backend distributed_timeout_minutes
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers cp_comm_type fp8_param_gather deterministic_mode
    init_method_xavier_uniform
"""
TRANSLATED = frozenset(_TRANSLATED.split())
"""Arguments for which `translate` has a rule of its own."""

_PASSED_ON: Mapping[str, str] = {
    "transformer": """
        tensor_parallel_num_weight_shards pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
        hybrid_context_parallel expert_tensor_parallel_num_weight_shards perform_initialization tp_comm_overlap tp_comm_bulk_wgrad
        tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
        cross_entropy_loss_fusion cross_entropy_fusion_impl tp_comm_bootstrap_backend overlap_moe_expert_parallel_comm delay_wgrad_compute
        overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release use_ring_exchange_p2p
        defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers mtp_detach_heads mtp_hybrid_override_pattern
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split attention_backend flash_attention_version softmax_type
        fp32_residual_connection apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_qkv_bias
        glu_linear_offset activation_func_clamp_value rotary_interleaved qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold
        attention_output_gate multi_latent_attention experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim
        dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        init_method_std embedding_init_method_std init_model_with_meta_device use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_base_head_dim mup_attn_scale_power apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul
        use_fused_weighted_squared_relu fused_residual_rmsnorm use_transformer_engine_op_fuser recompute_granularity recompute_method
        recompute_num_layers distribute_saved_activations recompute_modules fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe fp4_quantizer_factory
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap use_grouped_gemm_for_shared_expert
        moe_shared_expert_glu_interleave_size moe_enable_routing_replay moe_router_padding_for_quantization moe_router_padding_for_fp8
        moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function
        moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema
        moe_router_force_load_balancing moe_router_force_biased use_grouped_gemm_for_dense_mlp moe_grouped_gemm moe_single_grouped_weight
        moe_single_grouped_bias moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs moe_per_layer_logging
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy
        moe_layer_recompute moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size moe_flex_dispatcher_num_sms
        moe_deepep_num_sms moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy moe_mlp_glu_interleave_size
        moe_expert_rank_capacity_factor enable_cuda_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_impl
        clone_scatter_output_in_embedding batch_invariant_mode use_te_activation_func mrope_section is_hybrid_model mamba_state_dim
        mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mlp_chunks_for_training transformer_impl
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction moe_paged_stash moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu fine_grained_offloading_max_inflight_offloads
        window_size window_attn_skip_freq no_rope_freq attention_softmax_in_fp32 mamba_training_ssm_states_dtype
        pipeline_model_parallel_layout moe_layer_freq moe_router_load_balancing_type moe_aux_loss_coeff linear_attention_freq
    """,
    "optimizer": """
        weight_decay apply_wd_to_qk_layernorm clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum muon_momentum muon_split_qkv
        muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_scalar_optimizer lion_beta1 lion_beta2 optimizer optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params lr min_lr
        reuse_grad_buf_for_mxfp8_param_ag overlap_param_gather overlap_param_gather_with_optimizer_step use_distributed_optimizer
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    """,
    "distributed_data_parallel_config": """
        use_megatron_fsdp overlap_grad_reduce nccl_ub disable_symmetric_registration fsdp_manual_registration gradient_reduce_div_fusion
        fsdp_double_buffer suggested_communication_unit_size keep_fp8_transpose_cache num_distributed_optimizer_instances fp4_param_gather
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
    """,
}
PASSED_ON: Mapping[str, frozenset[str]] = {kind: frozenset(names.split()) for kind, names in _PASSED_ON.items()}
"""Section of `policy.megatron_cfg` to arguments that are its options under the same name."""

BOTH = frozenset({"overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"})
"""Arguments of `optimizer` that megatron-core reads from its `distributed_data_parallel_config`, too."""

SILENT: Mapping[str, str] = {
    "position_embedding_type": "the job's models have rope and no other",
    "use_rotary_position_embeddings": "the job's models have rope and no other",
    "micro_batch_size": "a row is a microbatch of a job",
    "tokenizer_type": "the job has the SFT tokenizer and no other",
    "cp_comm_type": "p2p is the job's own",
    "split": "all rows of the file are trained",
    "sequence_parallel": "it acts only where --tensor-model-parallel-size is above 1",
    "data_sharding": "it acts only with --dataloader-type cyclic",
    "pad_vocab_size": "it is in model.vocab_size",
    "bias_gelu_fusion": "it acts only without --swiglu",
    "bias_swiglu_fusion": "it acts only with --swiglu",
    **dict.fromkeys(("vocab_size", "make_vocab_size_divisible_by"), "--padded-vocab-size says the size itself"),
    "num_layers": "the hybrid layer pattern has the number of layers",
    **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_iters"), "it acts only with --lr-decay-style WSD"),
    **dict.fromkeys(("wandb_exp_name", "wandb_entity"), "it acts only with --wandb-project"),
    **dict.fromkeys(
        ("moe_ffn_hidden_size", "moe_router_topk", "expert_tensor_parallel_size"), "it acts only with --num-experts"
    ),
    **dict.fromkeys(("mtp_loss_scaling_factor", "mtp_use_repeated_layer"), "it acts only with --mtp-num-layers"),
    "eval_global_batch_size": "it acts only with a validation file and --eval-interval",
    "no_save_optim": "it acts only with --save and --save-interval",
    "pretrained_checkpoint": "--finetune --load names the weights to start from",
    "data_path": "--train-data-path names the rows",
    "lr_warmup_iters": "--lr-warmup-fraction gives the warm-up",
    "optimizer_offload_fraction": "it acts only with --optimizer-cpu-offload",
}
"""Argument to the reason why a command line may have it and the job has no key of it."""

_REFUSED: Mapping[str, str] = {
    "its run is counted in samples, ours in steps: give the iterations (--train-iters, --lr-decay-iters, …)": """
        train_samples lr_decay_samples lr_wsd_decay_samples lr_warmup_samples
    """,
    "the global batch changes in the run, ours is one size: start a job for each size": """
        rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed
    """,
    "it ends the run early: set --train-iters, or checkpointing.checkpoint_must_save_by in the YAML, instead": """
        exit_interval exit_duration_in_mins
    """,
    "it leaves steps or training out: write what is trained into files of their own": """
        iterations_to_skip skip_train start_eval_at_iter freeze_all_layers
    """,
    "it is an older name that Megatron-LM itself refuses: give its successor": """
        batch_size warmup checkpoint_activations model_parallel_size
    """,
    "the job's model does not have it: take it out": """
        openai_gelu quick_geglu onnx_safe use_rope_scaling rotary_seq_len_interpolation_factor add_position_embedding spec
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json biencoder_projection_dim vision_pretraining rope_type
        moe_use_upcycling fp16_lm_cross_entropy data_parallel_random_init te_precision_config_file
    """,
    "the job's optimizer does not have it: take it out": """
        no_weight_decay_cond_type decoupled_lr decoupled_min_lr loss_scale head_lr_mult ddp_param_name_patterns_for_fp32_local_accumulation
    """,
    "the job does not have this layout of ranks or layers: take it out": """
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank use_torch_fsdp2 use_tp_pp_dp_mapping
        enable_full_sharding_in_hsdp create_all_gather_group fake_process_group
    """,
    "the job reads packed rows from files alone: write them into files, and name these by --train-data-path and --valid-data-path": """
        mock_data data_args_path per_split_data_args_path per_dataset_sequences_path phase_transition_iterations fim_data
        dataloader_inter_document_masking full_validation multiple_validation_sets validation_set_names eval_micro_batch_size chat_template
        special_tokens allow_ambiguous_pad_tokens
    """,
    "it is another training than SFT: take it out": """
        perform_rl_step logits_load_dir
    """,
    "the arguments are taken from a checkpoint, so that the command line does not say what is trained: give the log's argument dump instead": """
        use_checkpoint_args use_mp_args_from_checkpoint_args yaml_cfg
    """,
    "it injects faults: take it out": """
        error_injection_rate fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types fault_injector_fault_probabilities
    """,
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REFUSED.items() for name in names.split()}
"""Argument to the reason why it is refused at any value but its default, and what to do instead."""

_WITHOUT_EFFECT: Mapping[str, str] = {
    "Megatron-LM itself ignores it: models of megatron-core are the only ones": """
        deprecated_use_mcore_models
    """,
    "it is an older name that Megatron-LM itself gives no effect": """
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated
    """,
    "it is an older name, which turns --enable-msc off; that says how files are read, not what is trained": """
        disable_msc_deprecated
    """,
    "it is an older name of --cuda-graph-modules, which says what a CUDA graph holds, not what is trained": """
        cuda_graph_scope_deprecated
    """,
    "it chooses a kernel, and results are equal up to rounding; the job takes its own": """
        masked_softmax_fusion bias_dropout_fusion apply_rope_fusion gradient_accumulation_fusion no_persist_layer_norm disable_jit_fuser
        use_flash_attn
    """,
    "it says how ranks meet, not what is trained": """
        align_param_gather align_grad_reduce overlap_p2p_comm use_gloo_process_groups lazy_mpu_init local_rank nccl_communicator_config_path
        use_sharp sharp_enabled_group high_priority_stream_groups distributed_timeout_seconds_after_init use_layer_wise_param_layout
        barrier_with_L1_time tp_comm_overlap_cfg torch_fsdp2_reshard_after_forward data_parallel_sharding_strategy
        outer_dp_sharding_strategy use_cpu_initialization empty_unused_memory_level te_rng_tracker inference_rng_tracker manual_gc
        manual_gc_interval manual_gc_eval train_sync_interval num_dataset_builder_threads cuda_graph_modules enable_experimental enable_msc
        high_priority_a2a_comm_stream
    """,
    "it has an effect only where another argument, which is refused or written, turns a part on": """
        yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
        relative_attention_num_buckets relative_attention_max_distance rope_scaling_factor max_position_embeddings rotary_scaling_factor
        mscale mscale_all_dim q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents mla_down_proj_fusion
        moe_upcycling_granularity initial_loss_scale min_loss_scale loss_scale_window hysteresis fault_injector_delay_start_iteration
    """,
    "the SFT dataset does not read it": """
        encoder_num_layers decoder_num_layers encoder_seq_length decoder_seq_length bert_binary_head test_data_path reset_position_ids
        reset_attention_mask eod_mask_loss create_attention_mask_in_dataloader sample_rate mask_prob short_seq_prob data_cache_path
        mmap_bin_files dataloader_fast_cache_load dataloader_defer_npy_index_mmap object_storage_cache_path mid_level_dataset_surplus
    """,
    "the SFT tokenizer does not read it": """
        vocab_file merge_file vocab_extra_ids metadata_path trust_remote_code
    """,
    "it checks, records or restarts, and trains nothing else": """
        check_for_nan_in_loss_and_grad check_for_large_grads check_weight_hash_across_dp_replicas_interval gpu_sniff_test_interval
        rerun_mode check_for_spiky_loss result_rejected_tracker_filename dump_param_to_param_group_map enable_ft_package calc_ft_timeouts
        ft_num_warmup_iters error_injection_type run_workload_inspector_server config_logger_dir test_mode adlr_autoresume
        adlr_autoresume_interval exit_signal exit_signal_handler exit_signal_handler_for_dataloader exit_signal_handler_for_training
        timing_log_level timing_log_option enable_one_logger replication replication_jump replication_factor iter_per_epoch
        log_max_attention_logit log_num_zeros_in_grad profile profile_step_start profile_step_end use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks
        record_memory_history memory_snapshot_path record_shapes nvtx_ranges save_params_interval save_activations_interval
        save_tokens_per_expert_interval save_wgrads_interval save_dgrads_interval flight_recorder_dump_path
        flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec log_params_norm log_throughput log_progress
        tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard
        log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval log_device_memory_used log_world_size_to_tensorboard
        wandb_save_dir logging_level log_energy moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights logits_save_top_k logits_save_top_p logits_save_top_p_min_k
        logits_save_dir logits_save_dtype log_straggler straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup
        one_logger_project one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version inprocess_restart
        inprocess_max_iterations inprocess_monitor_thread_interval inprocess_monitor_process_interval inprocess_progress_watchdog_interval
        inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity
        inprocess_active_world_size inprocess_empty_cuda_cache fault_injector_fault_delay fault_injector_mtti_seconds
        fault_injector_offset_seconds fault_injector_seed
    """,
    "checkpoints are written by this job's own rules (docs/checkpoints.md)": """
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler save_retain_interval load_main_params_from_ckpt
        non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir
        non_persistent_local_ckpt_algo ckpt_step use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint ckpt_format
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save
        async_save async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm
        ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity strict_fsdp_dtensor_load
        dist_ckpt_strictness dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
        verify_integrity stream_ckpt_dequant no_save_rng no_load_optim no_load_rng override_ckpt_iteration dist_ckpt_workers
    """,
    "it is read by another task than SFT (generation, reinforcement learning, BERT, retrieval, vision)": """
        inference_cuda_graph_scope flash_decode symmetric_ar_type nccl_all_reduce_for_prefill inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type mlp_chunks_for_prefill rl_prompts_per_eval grpo_prompts_per_step grpo_group_size
        rl_generation_lag rl_submission_granularity rl_consumption_granularity grpo_iterations grpo_clamp_eps_lower grpo_clamp_eps_upper
        grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature rl_default_top_p
        rl_default_top_k rl_offload_optimizer_during_inference rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef rl_use_sequence_packing
        rl_sequence_packing_max_sequences_per_bin rl_sequence_packing_algo rl_training_cuda_graphs rl_inference_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle refit_method rl_verify_model_weights_swap
        rl_skip_bos_token rl_profile rl_profile_dir rl_inference_parsers fim_rate fim_spm_rate fim_split_sample fim_fragment_rate
        fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token tiktoken_pattern
        tiktoken_num_special_tokens tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id null_tokenizer_pad_id ict_head_size
        biencoder_shared_query_context_model ict_load bert_load titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path
        retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path indexer_batch_size indexer_log_interval
        num_classes img_h img_w num_channels patch_dim classes_fraction data_per_class_fraction vision_pretraining_type vision_backbone_type
        swin_backbone_type mask_type mask_factor dino_local_img_size dino_local_crops_number dino_head_hidden_size dino_bottleneck_size
        dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth logits_load_kd_loss_alpha
        logits_load_ignore_errors inference_batch_times_seqlen_threshold max_tokens_to_oom output_bert_embeddings bert_embedder_type
        use_legacy_static_engine inference_max_requests inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_tokens inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_track_generated_token_events
        decode_only_cuda_graphs inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill num_speculative_tokens
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_sampling_backend
        offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging inference_coordinator_port
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives
        inference_disable_ep_consensus inference_shards
    """,
}
WITHOUT_EFFECT: Mapping[str, str] = {name: why for why, names in _WITHOUT_EFFECT.items() for name in names.split()}
"""Argument to the reason why it has no effect on what is trained."""

_DERIVED = """
    _is_global_batch_size_explicitly_specified consumed_train_bins consumed_train_samples consumed_valid_samples cpu_offloading
    data_parallel_size expert_gtp_weight_remat_size grpo_samples_per_iteration gtp_weight_remat_size params_dtype rank skipped_train_samples transformer_pipeline_model_parallel_size
    use_custom_fsdp use_dist_ckpt use_layer_wise_distributed_optimizer variable_seq_lengths virtual_pipeline_model_parallel_size world_size
"""
DERIVED = frozenset(_DERIVED.split())
"""Names of a dump that Megatron-LM derives from its arguments."""

ONLY_ONE = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Derived sizes of a layout that a job does not have: they must be 1."""

FILLED_IN: Mapping[str, str] = {
    "eval_micro_batch_size": "micro_batch_size",
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}
"""Argument that a run fills in from another one, so that a dump has its value where nothing was given."""
