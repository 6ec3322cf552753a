"""List MaxText's keys without a key here: the value each must have, and which play no part.

`maxpipe.config.maxtext.KEYS` has the other keys. A name may hold wildcards, as in `sa_*`; an exact
name takes precedence over one with wildcards.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Value: TypeAlias = str | float | bool | list[str] | None


@dataclass(frozen=True)
class Limit:
    """Keys that must each have a certain value, because maxpipe does what that value does.

    Attributes:
      advice: why another value does not work, and what to use; without a full stop.
      values: the value that each key must have; None also stands for an empty one.
      blocks: whether a configuration with another value cannot be translated; otherwise the result
        trains with that difference.
    """

    advice: str
    values: Mapping[str, Value]
    blocks: bool = True


@dataclass(frozen=True)
class Idle:
    """Keys that play no part in a run of maxpipe, whatever their values.

    Attributes:
      reason: why they play no part; without a full stop.
      names: names or patterns, separated by blanks.
    """

    reason: str
    names: str


# Limits of the model; they add nothing if the decoder block already has no counterpart.
MODEL_LIMITS = (
    Limit(
        "experts that every token uses are in none of the blocks that are translated; "
        "model.moe.shared_experts has them, as in configs/models/deepseek-v3.yml",
        {"shared_experts": 0},
    ),
    Limit(
        "the loss is that of the next token; no layers predict later ones",
        {"mtp_num_layers": 0},
    ),
    Limit(
        "MaxText measures balance over the batch; set model.moe.balance_loss, which does within "
        "each sequence, or model.moe.bias_rate in the result",
        {"load_balance_loss_weight": 0},
    ),
    Limit(
        "routing and layers as DeepSeek's are not translated; model.moe.router, scale, groups, "
        "groups_per_token, bias_rate and model.first_dense_layers have them, as in "
        "configs/models/deepseek-v3.yml",
        {
            "routed_score_func": None,
            "routed_scaling_factor": 1,
            "routed_bias_update_rate": 0,
            "n_routing_groups": -1,
            "first_num_dense_layers": 0,
        },
    ),
    Limit(
        "routers choose by their logits, experts are in every layer after "
        "model.first_dense_layers, and read all of model.embed_dim",
        {
            "use_random_routing": False,
            "first_num_hash_layers": 0,
            "interleave_moe_layer_step": 1,
            "moe_expert_input_dim": -1,
        },
    ),
    Limit(
        "no token is left out for want of a buffer; model.moe.capacity_factor can bound experts",
        {"ragged_buffer_factor": -1, "eval_ragged_buffer_factor": -1},
        blocks=False,
    ),
    Limit(
        "only MaxText's gpt_oss and deepseek blocks read it, which are not translated; "
        "model.mlp_limit clamps the projections of the MLP, as in configs/models/gpt-oss-20b.yml",
        {"mlp_activations_limit": -1},
    ),
    Limit("all layers have an MLP of model.mlp_dim", {"use_double_wide_mlp": False}),
    Limit(
        "a layer attends to all earlier tokens of its document, or to those in "
        "model.attention_window, not to chosen ones",
        {"moba": False, "use_indexer": False, "use_ragged_attention": False},
    ),
    Limit(
        "every layer makes keys and values of its own; model.attention_kind=mla makes both of one "
        "latent",
        {"share_kv_projections": False, "num_kv_shared_layers": 0},
    ),
    Limit(
        "all layers have the same heads, and outputs of model.embed_dim",
        {"attention_output_dim": -1, "global_head_dim": 0, "global_num_kv_heads": 0},
    ),
    Limit(
        "scores of attention are scaled by model.query_scale and bounded by "
        "model.attention_soft_cap alone",
        {"temperature_tuning": False, "use_qk_clip": False},
    ),
    Limit(
        "kinds of layers are not translated; model.layer_pattern and model.first_dense_layers in "
        "the result set them",
        {"inhomogeneous_layer_cycle_interval": 1, "nope_layer_interval": -1},
    ),
    Limit(
        "not translated; model.rope_fraction rotates a share of a head's channels, and "
        "model.rope_theta is the base of global layers",
        {"partial_rotary_factor": 1, "global_rope_max_timescale": -1},
    ),
    Limit(
        "positions are those of text, in rotary embeddings whose fastest frequency is 1",
        {
            "rope_min_timescale": 1,
            "use_mrope": False,
            "use_untrainable_positional_embedding": False,
            "trainable_position_size": -1,
        },
    ),
    Limit("norms have learnt scales", {"qk_norm_with_scale": True, "v_norm_with_scale": True}),
    Limit(
        "there is one residual stream, and layers read nothing else",
        {
            "mhc_expansion_rate": 1,
            "engram_layers": [],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    ),
)

LIMITS = (
    *MODEL_LIMITS,
    Limit(
        "parameters start from a normal distribution of its own width",
        {"dense_init_scale": 1},
        blocks=False,
    ),
    Limit(
        "model.quantisation computes scales in another way; set that instead",
        {
            "quantization": None,
            "use_manual_quantization": False,
            "quantize_mtp": False,
            "quantize_logits_proj": False,
            "te_comm_gemm_overlap": "disabled",
            "experimental_sa_quant_q_fp8": False,
            "experimental_sa_quant_k_fp8": False,
            "weight_block_size": None,
        },
    ),
    Limit(
        "weights are dense and all of them are trained",
        {"weight_sparsity_n": None, "weight_sparsity_m": None, "trainable_parameters_mask": []},
    ),
    Limit(
        "sums of squares, softmax, logits and gradients are float32, products model.dtype",
        {
            "grad_dtype": "float32",
            "mu_dtype": None,
            "logits_dot_in_fp32": False,
            "cast_logits_to_fp32": True,
            "float32_qk_product": False,
            "activations_in_float32": False,
            "matmul_precision": "default",
        },
        blocks=False,
    ),
    Limit(
        "the state stays on the devices; mesh.ici.fsdp splits parameters and moments",
        {
            "optimizer_memory_host_offload": False,
            "parameter_memory_host_offload": False,
            "shard_optimizer_over_data": False,
        },
    ),
    Limit(
        "the layer's input is always saved on the device",
        {"decoder_layer_input": "device"},
        blocks=False,
    ),
    Limit(
        "the mesh has no such axis; use data, stage, fsdp, context, tensor or expert",
        {
            f"{level}_{axis}_parallelism": 1
            for level in ("ici", "dcn")
            for axis in (
                "diloco",
                "fsdp_transpose",
                "context_usp_ulysses",
                "context_autoregressive",
                "tensor_sequence",
                "autoregressive",
            )
        },
    ),
    Limit(
        "sharding.logical_axis_rules maps the logical axes; --print-config shows them",
        {"custom_mesh_and_rule": None, "custom_mesh_and_rule_for_eval": None},
    ),
    Limit(
        "leave it out; data.source=chat in the result learns what the assistant writes, and "
        "init_from begins with weights (docs/finetuning.md)",
        {"use_sft": False, "use_chat_template": False},
    ),
    Limit(
        "the objective is the next token",
        {
            "training_objective": "causal_lm",
            "use_dpo": False,
            "use_multimodal": False,
            "use_audio": False,
            "eod_mask_loss": False,
            "enable_diloco": False,
            "enable_streaming_diloco": False,
        },
    ),
    Limit(
        "the optimizer's state is not read; load_parameters_path reads the parameters of any step",
        {"load_full_state_path": None},
    ),
    Limit(
        "adapters of other runs are not read; model.lora.rank trains new ones",
        {"lora_input_adapters_path": None, "hf_lora_adapter_path": None},
    ),
    Limit(
        "the batch has one size; give per_device_batch_size alone",
        {"enable_rampup_batch_size": False, "reuse_example_batch": 0},
    ),
    Limit(
        "the optimizer has no such term; leave it at its default",
        {"adam_eps_root": 0},
    ),
    Limit(
        "weight decay applies to matrices, not to norms and biases",
        {"adamw_mask": []},
        blocks=False,
    ),
    Limit(
        "documents begin and end with the tokenizer's own tokens, and packing separates them",
        {
            "add_bos": True,
            "add_eos": True,
            "reset_attention_mask": True,
            "use_stream_chunking": None,
            "max_segments_per_seq": -1,
        },
        blocks=False,
    ),
    Limit(
        "leave it out; data.source=datasets reads a directory of files by data.path=hf:DIR",
        {"hf_data_dir": None},
    ),
    Limit(
        "leave it out; data.column in the result names the column of a document's text",
        {"train_data_columns": ["text"], "tokenize_train_data": True},
    ),
    Limit(
        "optimizer.schedule=wsd falls in a straight line",
        {"wsd_decay_style": "linear"},
        blocks=False,
    ),
    Limit(
        "a run ends when a multiple of steps is done; use steps or stop_after",
        {"target_eval_loss": 0},
        blocks=False,
    ),
)

IDLE = (
    Idle(
        "a matter of how experts are computed; model.moe.kernel and model.moe.dispatch choose here",
        "megablox sparse_matmul num_moe_* moe_* te_moe_* te_ep_* te_gmm_* ragged_gather_* "
        "retry_dropless_* first_phase_* log_required_* use_custom_sort_vjp router_topk_* "
        "use_ring_of_experts use_ragged_sort wi_tile_* wo_tile_* eval_wi_tile_* eval_wo_tile_* "
        "use_gather_mosaic_kernel merge_gating_gmm use_tokamax_gmm use_gmm_v2* "
        "return_routed_experts shard_exp_on_fsdp shard_embed_moe_on_fsdp use_2d_fsdp_sharding "
        "use_batch_split_schedule batch_split_factor use_lineage",
    ),
    Idle(
        "weights of a token's experts add up to 1 in the blocks mixtral and qwen3_moe anyway",
        "norm_topk_prob",
    ),
    Idle(
        "routers and sums over experts compute in float32",
        "float32_weight_sum float32_gate_logits quantize_router_proj",
    ),
    Idle("for n_routing_groups", "topk_routing_*"),
    Idle("for prediction of several tokens, which mtp_num_layers adds", "mtp_*"),
    Idle(
        "for quantization",
        "constant_bound_config replicate_quant_scale quant_cfg_path quantize_kvcache kv_quant_* "
        "checkpoint_is_quantized save_quantized_params_path use_qwix_quantization "
        "*_calibration_method quantization_local_shard_count unquantized_modules",
    ),
    Idle("for sparse weights", "weight_sparsity_*"),
    Idle(
        "for images, video and sound",
        "*_for_vit *_for_audio vision_* image_* video_* audio_* freeze_vision_* freeze_audio_* "
        "dtype_mm *_image_column use_audio_in_video max_num_images_* mrope_section "
        "position_id_per_seconds",
    ),
    Idle(
        "for attention_type=mla, which is not translated; model.mla.* has the widths",
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "use_sliced_mla_proj use_mla_absorbed_mqa mla_*",
    ),
    Idle(
        "for attention that no block has which is translated, such as sparse attention",
        "o_lora_rank o_groups csa_* indexer_* moba_* chunk_attn_window_size "
        "causal_block_size qk_clip_threshold "
        "compress_* compressed_* use_csa_* gdn_* use_qk_norm_in_gdn local_rope_proportion "
        "global_rope_proportion query_wa_proj kv_wa_proj engram* sinkhorn_iterations "
        "enable_mhc_lite use_mhc_* mhc_*",
    ),
    Idle(
        "for YaRN, which rope_type chooses and is not translated; model.rope_scaling.* has it",
        "max_position_embeddings original_max_position_embeddings rope_factor beta_fast beta_slow "
        "mscale rope_interleave rope_truncate rope_attention_scaling rope_pairwise",
    ),
    Idle(
        "a matter of kernels, which do not change the result; model.attention and "
        "model.attention_block_size choose the kernel and its blocks",
        "sa_* eval_sa_* local_sa_* eval_local_sa_* use_splash_scheduler local_use_splash_scheduler "
        "use_tokamax_splash use_jax_splash use_max_logit_estimate cost_estimate_* ring_scan_unroll "
        "dq_reduction_steps force_q_layout ragged_block_size enable_padding_causal_mask "
        "float32_logits",
    ),
    Idle(
        "a matter of how the same products are written",
        "fused_qkv fused_mlp use_iota_embed mlpwi kv_proj qkv_proj compute_axis_order reshape_q",
    ),
    Idle(
        "a matter of how the program is divided; the mesh and sharding.logical_axis_rules decide",
        "logical_axis_rules_for_eval input_data_sharding_logical_axes override_logical_axis_rules "
        "context_sharding ulysses_context_sharding sharding_tolerance shard_mode shardy "
        "custom_mesh allow_split_physical_axes optimize_mesh_for_tpu_v6e "
        "remove_size_one_mesh_axis_* check_vma context_parallel_reorder_strategy "
        "dense_fsdp_use_two_stage_* vocab_tiling_ag_once defer_small_all_reduces subslice_shape",
    ),
    Idle(
        "for diffusion of blocks and for training over slow networks",
        "block_diffusion_* diloco_* num_diloco_fragments use_sequential_layers "
        "num_communication_overlapping_steps communication_overlapping_alpha dcn_bandwidth_*",
    ),
    Idle("for distillation, adapters and learning from rewards", "distill_* sft_*"),
    Idle(
        "checkpoints are always atomic, verified, written in the background, at the end of a run "
        "and when it is preempted; docs/checkpoints.md",
        "save_checkpoint_* enable_continuous_* enable_single_replica_* checkpoint_todelete_* "
        "standalone_checkpointer_* checkpoint_storage_* enable_orbax_v1 checkpoint_conversion_fn "
        "source_checkpoint_layout colocated_python_checkpointing enable_autocheckpoint "
        "force_unroll enable_multi_tier_* multi_tier_* mtc_* enable_emergency_* local_checkpoint_* "
        "enable_checkpoint_cloud_logger",
    ),
    Idle("mesh.elastic.axes says which axes shrink when a host is lost", "elastic_*"),
    Idle("telemetry.wandb=PROJECT in the result sends metrics there", "enable_wandb wandb_*"),
    Idle(
        "every run writes metrics.jsonl, TensorBoard files, MFU and goodput into its directory; "
        "docs/operations.md",
        "metrics_file gcs_metrics save_config_to_gcs enable_mllog mllog_file "
        "record_internal_nn_metrics enable_goodput_* goodput_* monitor_* enable_pathways_goodput "
        "step_deviation_* enable_gcp_* report_* heartbeat_* enable_tensorboard use_vertex_* "
        "vertex_* managed_mldiagnostics* log_config log_step_diagnostics prometheus_port "
        "log_moe_bias_norms",
    ),
    Idle(
        "telemetry.profile_steps says which steps are traced",
        "upload_all_profiler_results hide_profiler_* profile_cleanly profile_periodically_* "
        "enable_tpu_profiling_* tpu_num_* enable_jax_profiler jax_profiler_port xprof_* "
        "profile_power_events",
    ),
    Idle(
        "maxpipe.compile reports the program; sharding.debug prints its shardings; XLA_FLAGS "
        "writes its text",
        "dump_* internal_compile* compile_xla_flags compiled_trainstep_file debug_sharding "
        "write_estimator_result jax_debug_log_modules max_checkify",
    ),
    Idle(
        "for other readers of data; data.source and data.path say what is read",
        "dataset_name eval_dataset_name eval_split hf_eval_* "
        "hf_access_token grain_eval_files grain_packing_type grain_per_worker_* grain_num_threads* "
        "grain_prefetch_* grain_worker_count_eval grain_ram_budget_mb grain_data_source_* "
        "grain_index_* grain_shuffle_* grain_use_elastic_* mmap_* blend_* packing_max_* olmo_* "
        "colocated_python_data_input train_shard_in_read train_interleave_* tokenize_eval_data "
        "eval_data_columns max_corpus_chars expansion_factor_real_data num_epoch "
        "generate_padding_* use_truncation chat_template* default_prompt",
    ),
    Idle(
        "for generation and inference; maxpipe.generate takes flags of its own",
        "model_call_mode max_prefill_* prompt load_from_prefill_dir prefill_* autoregressive_* "
        "decode_* inference_* generate_slice enable_model_warmup enable_llm_* multi_sampling "
        "return_log_prob stack_prefill_* ar_cache_* use_chunked_prefill enable_prefix_* "
        "prefix_caching_* vllm_* use_weight_converter rollout_* kv_tp_size weight_sync_* "
        "use_raiden_ffi",
    ),
    Idle(
        "a matter of starting processes and programs; docs/operations.md",
        "jax_distributed_* skip_jax_distributed_* enable_single_controller max_inflight_* "
        "block_state_before_* warm_input_* warmup_programs_* use_m3_model",
    ),
    Idle(
        "for a growing batch",
        "global_rampup_samples per_device_batch_size_start per_device_batch_size_increment",
    ),
    Idle("for muon inside MaxText", "muon_type muon_include_routers muon_use_all_to_all"),
    Idle("evaluations begin with the first that eval.every asks for", "eval_start_step"),
)

# Keys of MaxText 0.2.5 that its base.yml has not: of its other programs, or set by itself.
OTHERS = (
    "*_vllm *_weight_sync algo async_scheduling attn_module_name batch_size checkpoint_dir "
    "chips_per_vm cluster convert_checkpoint_if_possible data_template_path dataset* "
    "dcn_parallelism debug debug_converter dpo* enable_dp_attention enable_expert_parallel "
    "enable_lora enable_tunix_* epsilon_high eval_* evaluation force_on_policy_ratio "
    "formatting_func_* fuse_expert_scales gcs_debug_path generation_configs "
    "global_batch_size_to_* grpo_* hf_subset ici_parallelism kv_cache_buffer learn_to_init_mode "
    "load_checkpoint_only_once log_sampler_* log_weight_sync_time lora* loss_* lti_* "
    "math_verify_* max_concurrency max_num_* max_prompt_length max_seq_token_per_tpu "
    "metrics_dir micro_batch_size_to_* mlp_dim num_*_slices num_batches num_diloco_replicas "
    "num_eval_passes num_generations num_iterations num_kv_heads num_query_heads "
    "num_target_devices num_test_batches off_policy_steps offline_data_dir orpo_* "
    "padded_base_moe_mlp_dim penalty_* prefuse_moe_weights ragged_sort_use_single_sparsecore "
    "rampup_* reasoning_* replicator_backup_interval_minutes reshard_chunk_size reward* rl "
    "sampler_devices_fraction sharding_strategy solution_* special_tokens stop_strings "
    "student_* swap_space_vllm_gb system_prompt teacher_* tensorboard_dir tensors_* "
    "test_batch_start_index train_fraction train_micro_batch_size trainer_devices_fraction "
    "use_agentic_rollout use_grpo use_pathways* use_replicator_service use_rollout_logps "
    "use_standalone_converter use_tunix_* using_pipeline_parallelism vllm"
)
_LIMIT_OF = {key: limit for limit in LIMITS for key in limit.values}
_IDLE_NAMES = [(name, idle) for idle in IDLE for name in idle.names.split()]


def limit_of(key: str) -> Limit | None:
    """Return what bounds the value of a MaxText key; None if nothing does."""
    return _LIMIT_OF.get(key)


def is_other(key: str) -> bool:
    """Return whether MaxText has a key that its base.yml has not."""
    return any(fnmatch.fnmatchcase(key, name) for name in OTHERS.split())


def idle_of(key: str) -> Idle | None:
    """Return why a MaxText key plays no part; None if it plays one, or is not a MaxText key."""
    if key in _LIMIT_OF:
        return None
    exact = (idle for name, idle in _IDLE_NAMES if name == key)
    matching = (idle for name, idle in _IDLE_NAMES if fnmatch.fnmatchcase(key, name))
    return next(exact, None) or next(matching, None)
