"""Map MaxText's keys to ours, for error messages, translation and the table of docs/maxtext.md."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Value: TypeAlias = str | float | bool | list[str] | None

SAME_NAMES = ("run_name", "steps")  # keys that both have


class Key(NamedTuple):
    """A key of MaxText.

    Attributes:
      ours: the counterpart, empty if there is none.
      differs: what differs.
      default: its value in MaxText 0.2.5, if the translation reads it and it is not false, None or,
        for axes of the mesh, 1.
    """

    ours: str = ""
    differs: str = ""
    default: Value = None


@dataclass(frozen=True)
class Limit:
    """Keys without a counterpart that must each have a certain value, which maxpipe acts by.

    Attributes:
      advice: why another value does not work, and what to use; without a full stop.
      off: names of keys that must be off: false, 0, -1 or empty.
      values: the values that further keys must have.
      blocks: whether another value is refused; otherwise the result trains with the difference.
      ours: a key of maxpipe that takes their place where the user sets it.
    """

    advice: str
    off: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    blocks: bool = True
    ours: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.off.split(), *self.values)

    def allows(self, key: str, value: Value) -> bool:
        """Return whether a key may have a value: 1 means the same as 1.0, but not as true."""
        if key not in self.values:
            return value in (None, False, 0, -1, [])
        wanted = self.values[key]
        return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


# Words in the names of MaxText's mesh axes -> ours; two of them share one.
AXES = {
    "data": "data",
    "pipeline": "stage",
    "fsdp": "fsdp",
    "context": "context",
    "sequence": "context",
    "tensor": "tensor",
    "expert": "expert",
}
_FITTED_AXES = ("ici_fsdp", "dcn_data")  # to the devices, unless they are given
_AXIS_DIFFERS = {
    "ici_fsdp": "1 unless set, where MaxText has -1",
    "dcn_data": "1 unless set, where MaxText has -1",
    "ici_sequence": "attention is split, too",
    "dcn_sequence": "attention is split, too",
}
# MaxText's tensors of a layer -> ours.
TENSORS = {
    "query_proj": "query_proj",
    "key_proj": "key_proj",
    "value_proj": "value_proj",
    "context": "context",
    "attention_out": "context",
    "out_proj": "out_proj",
    "mlpwi_0": "mlp_gate",
    "mlpwi_1": "mlp_up",
    "mlpwo": "mlp_down",
}
KEYS: dict[str, Key] = {
    **{
        f"{level}_{word}_parallelism": Key(
            f"mesh.{level}.{axis}",
            _AXIS_DIFFERS.get(f"{level}_{word}", ""),
            -1 if f"{level}_{word}" in _FITTED_AXES else None,
        )
        for level in ("ici", "dcn")
        for word, axis in AXES.items()
    },
    **{
        theirs: Key(f"pipeline.remat_tensors.{ours}", "with remat_policy=custom")
        for theirs, ours in TENSORS.items()
    },
    # pipeline
    "num_layers_per_pipeline_stage": Key("pipeline.num_layers_per_stage", "-1: derived", default=1),
    "num_pipeline_repeats": Key("pipeline.num_repeats", default=-1),
    "pipeline_parallel_layers": Key("pipeline.parallel_layers", default=-1),
    "num_pipeline_microbatches": Key("pipeline.num_microbatches", default=-1),
    "pipeline_delay_activation_forwarding": Key("pipeline.delay_activation_forwarding"),
    "pipeline_fsdp_ag_once": Key("pipeline.fsdp_gather", "true is written once"),
    "model_fsdp_ag_once": Key("pipeline.fsdp_gather", "true is written once"),
    "pipeline_fsdp_ag_per_repeat": Key("pipeline.fsdp_gather", "true is written per_repeat"),
    "scan_pipeline_iterations": Key("pipeline.scan_iterations", default=True),
    "scan_pipeline_repeats": Key("pipeline.scan_repeats", "dead in MaxText"),
    "set_remat_policy_on_pipeline_iterations": Key("pipeline.remat_iterations", default=True),
    "set_remat_policy_on_layers_per_stage": Key("pipeline.remat_layers", "sequential always does"),
    "scan_layers_per_stage": Key("pipeline.scan_layers_per_stage"),
    "scan_layers": Key("pipeline.scan_layers", "for the sequential engine"),
    "param_scan_axis": Key(differs="checkpoints always keep layers in dimension 0"),
    "remat_policy": Key("pipeline.remat_policy", "minimal also keeps context", default="full"),
    # mesh
    "context_parallel_load_balance": Key(differs="always balanced"),
    "context_parallel_strategy": Key(
        "sharding.context_strategy", "all_gather is written gather", default="all_gather"
    ),
    "mesh_axes": Key(differs="the mesh axes are fixed: data, stage, fsdp, context, tensor, expert"),
    "logical_axis_rules": Key("sharding.logical_axis_rules", "our own logical axes"),
    "data_sharding": Key(differs="batches are split over data, fsdp and expert"),
    "num_slices": Key(differs="taken from the devices", default=-1),
    "hardware": Key("mesh.simulated_devices", "cpu pretends to have devices", default="tpu"),
    # model
    "base_num_decoder_layers": Key("model.num_layers", default=16),
    "num_decoder_layers": Key("model.num_layers"),
    "base_emb_dim": Key("model.embed_dim", default=2048),
    "emb_dim": Key("model.embed_dim"),
    "base_num_query_heads": Key("model.num_query_heads", default=16),
    "base_num_kv_heads": Key("model.num_kv_heads", default=16),
    "base_mlp_dim": Key("model.mlp_dim", default=7168),
    "model_name": Key(differs="start from a preset: maxpipe.train NAME", default="default"),
    "override_model_config": Key(differs="of several values for a key the last one counts"),
    "global_parameter_scale": Key(differs="write the sizes themselves", default=1),
    "decoder_block": Key("model.block", "always llama, which takes options", default="llama2"),
    "head_dim": Key("model.head_dim", default=128),
    "vocab_size": Key("model.vocab_size", default=32_000),
    "dtype": Key("model.dtype", default="bfloat16"),
    "weight_dtype": Key("model.param_dtype", default="float32"),
    "logits_via_embedding": Key("model.tie_embeddings"),
    "normalize_embedding_logits": Key("model.logit_scale", "if tied", default=True),
    "mlp_activations": Key(
        "model.mlp_activation", "gelu_tanh for [gelu, linear]", default=["silu", "linear"]
    ),
    "mlp_bias": Key("model.mlp_bias", "of experts; MaxText's dense blocks have none"),
    "dropout_rate": Key("model.dropout", "on the outputs of attention and MLP", default=0),
    "enable_dropout": Key("model.dropout", "false is written 0", default=True),
    "z_loss_multiplier": Key("model.z_loss", default=0),
    "final_logits_soft_cap": Key("model.logit_soft_cap", "MaxText's is of tied ones", default=0),
    "num_vocab_tiling": Key("model.logit_tiles", default=1),
    "use_qk_norm": Key("model.qk_norm"),
    "attention_bias": Key("model.attention_bias"),
    "attention_sink": Key("model.attention_sinks"),
    "attention_type": Key("model.attention_kind", "gqa for global", default="global"),
    "sliding_window_size": Key("model.attention_window", "with model.layer_pattern", default=0),
    "attn_logits_soft_cap": Key("model.attention_soft_cap", "0 = no cap", default=0),
    "use_post_attn_norm": Key("model.norm_placement", "with use_post_ffw_norm: sandwich"),
    "use_post_ffw_norm": Key("model.norm_placement", "with use_post_attn_norm: sandwich"),
    "num_experts": Key("model.moe.experts", "0 = a dense MLP, where MaxText has 1", default=1),
    "num_experts_per_tok": Key("model.moe.per_token", default=1),
    "base_moe_mlp_dim": Key("model.moe.mlp_dim", "0 = model.mlp_dim", default=-1),
    "routed_bias": Key("model.moe.logit_bias", "DeepSeek's is model.moe.selection_bias"),
    "capacity_factor": Key("model.moe.capacity_factor", "of sequences; 0 = no bound", default=-1),
    "attention": Key("model.attention", "flash is called splash", default="autoselected"),
    "normalization_layer_epsilon": Key("model.norm_eps", default=1e-5),
    "rope_max_timescale": Key("model.rope_theta", default=10_000),
    "rope_type": Key("model.rope_scaling.factor", "8 for llama3.1", default="default"),
    "rope_linear_scaling_factor": Key("model.rope_scaling.factor", "with type=linear", default=1),
    "local_rope_max_timescale": Key("model.rope_theta_local", "0 = as global layers", default=-1),
    "rope_use_scale": Key("model.rope_scaling.factor", "false is written 1", default=True),
    # data
    "dataset_type": Key("data.source", "see --help data.source", default="synthetic"),
    "dataset_path": Key("data.path"),
    "grain_train_files": Key("data.path"),
    "grain_file_type": Key("data.source", "array_record or parquet", default="arrayrecord"),
    "grain_train_mixture_config_path": Key("data.mixture", "a list of sources with weights"),
    "hf_train_files": Key("data.path", "with data.source=jsonl, parquet or text"),
    "hf_path": Key("data.path", "hf:NAME with data.source=datasets; json, parquet, text: a source"),
    "hf_name": Key("data.path", "hf:NAME:CONFIGURATION with data.source=datasets"),
    "train_split": Key("data.path", "hf:NAME:CONFIGURATION:SPLIT with data.source=datasets"),
    "tokenizer_path": Key("data.tokenizer", "a tokenizer.json or SentencePiece model, or byte"),
    "tokenizer_type": Key("data.tokenizer", "told from the file's name", default="sentencepiece"),
    "packing": Key("data.packing", default=True),
    "max_target_length": Key("data.sequence_length", default=2048),
    "per_device_batch_size": Key("data.global_batch_size", "times the devices", default=12),
    "eval_per_device_batch_size": Key("eval.global_batch_size", "times the devices", default=0),
    "gradient_accumulation_steps": Key("pipeline.num_microbatches", "times stages", default=1),
    "grain_worker_count": Key("data.num_workers", default=1),
    "enable_data_shuffling": Key("data.shuffle", default=True),
    "data_shuffle_seed": Key("seed", "one seed for everything", default=0),
    "init_weights_seed": Key("seed", "one seed for everything", default=0),
    # training
    "base_output_directory": Key("output_dir", "a bucket: checkpoint.mirror"),
    "opt_type": Key("optimizer.name", default="adamw"),
    "adam_b1": Key("optimizer.beta1", default=0.9),
    "adam_b2": Key("optimizer.beta2", default=0.95),
    "adam_eps": Key("optimizer.eps", default=1e-8),
    "adam_weight_decay": Key("optimizer.weight_decay", "matrices only", default=0.1),
    "muon_beta": Key(differs="muon's momentum is 0.95", default=0.95),
    "muon_consistent_rms": Key(differs="muon's updates are scaled as with 0.2"),
    "muon_weight_decay": Key("optimizer.weight_decay", "matrices only", default=0),
    "gradient_clipping_threshold": Key("optimizer.grad_clip_norm", default=1),
    "skip_step_on_spikes": Key("optimizer.spike_window", "false is written 0"),
    "skip_step_interval": Key("optimizer.spike_window", default=128),
    "skip_step_scaling_factor": Key("optimizer.spike_deviations", default=6),
    "abort_on_nan_loss": Key("optimizer.max_consecutive_skips", "they are skipped", default=True),
    "abort_on_inf_loss": Key("optimizer.max_consecutive_skips", "they are skipped", default=True),
    "learning_rate": Key("optimizer.learning_rate", default=3e-5),
    "wsd_decay_steps_fraction": Key("optimizer.stable_fraction", "what is not decay", default=0.1),
    "lr_schedule_type": Key("optimizer.schedule", default="cosine"),
    "learning_rate_schedule_steps": Key("optimizer.decay_steps", default=-1),
    "warmup_steps_fraction": Key("optimizer.warmup_steps", "in steps", default=0.1),
    "learning_rate_final_fraction": Key("optimizer.final_fraction", default=0.1),
    "cosine_learning_rate_final_fraction": Key("optimizer.final_fraction"),
    "load_parameters_path": Key("init_from", "written maxtext:DIR; of full states too"),
    "enable_checkpointing": Key("checkpoint.every", "0 = never", default=True),
    "checkpoint_period": Key("checkpoint.every", default=10_000),
    "max_num_checkpoints_to_keep": Key("checkpoint.keep"),
    "async_checkpointing": Key(differs="checkpoints are always written in the background"),
    "eval_interval": Key("eval.every", "0 = never, where MaxText has -1", default=-1),
    "eval_steps": Key("eval.batches", default=-1),
    "log_period": Key("telemetry.log_every", default=100),
    "profiler": Key("telemetry.profile_steps", "[first, last]"),
    "profiler_steps": Key("telemetry.profile_steps", "[first, last]", default=5),
    "skip_first_n_steps_for_profiler": Key("telemetry.profile_steps", "[first, last]", default=1),
    "compile_topology": Key("compile.topology", "for maxpipe.compile"),
    "compile_topology_num_slices": Key("compile.num_slices", default=-1),
    "jax_cache_dir": Key("compile.cache_dir", "off = none", default="~/jax_cache"),
    "base_config": Key(differs="a YAML file inherits with base: other.yml"),
}


# Limits of the model; they add nothing if the decoder block already has no counterpart.
MODEL_LIMITS = (
    Limit(
        "not translated; keys of model.* have it, as in configs/models/deepseek-v3.yml",
        off="shared_experts routed_score_func routed_bias_update_rate n_routing_groups "
        "first_num_dense_layers mlp_activations_limit nope_layer_interval "
        "global_rope_max_timescale load_balance_loss_weight",
        values={
            "routed_scaling_factor": 1,
            "inhomogeneous_layer_cycle_interval": 1,
            "partial_rotary_factor": 1,
        },
    ),
    Limit(
        "no token is left out for want of a buffer; model.moe.capacity_factor can bound experts",
        off="ragged_buffer_factor eval_ragged_buffer_factor",
        blocks=False,
    ),
    Limit(
        "no model here has it; docs/families.md says what models can be",
        off="mtp_num_layers "
        "use_random_routing first_num_hash_layers moe_expert_input_dim use_double_wide_mlp "
        "moba use_indexer use_ragged_attention share_kv_projections num_kv_shared_layers "
        "attention_output_dim global_head_dim global_num_kv_heads temperature_tuning "
        "use_qk_clip use_mrope use_untrainable_positional_embedding trainable_position_size "
        "engram_layers hidden_size_per_layer_input vocab_size_per_layer_input",
        values={
            **dict.fromkeys(("qk_norm_with_scale", "v_norm_with_scale"), True),
            **dict.fromkeys(("interleave_moe_layer_step", "rope_min_timescale"), 1),
            "mhc_expansion_rate": 1,
        },
    ),
)
LIMITS = (
    *MODEL_LIMITS,
    Limit(
        "set model.quantisation instead, with scales of its own; experts have no 8-bit products",
        off="quantization use_manual_quantization quantize_mtp quantize_logits_proj "
        "experimental_sa_quant_q_fp8 experimental_sa_quant_k_fp8 weight_block_size",
        values={"te_comm_gemm_overlap": "disabled"},
        ours="model.quantisation",
    ),
    Limit(
        "sums of squares, softmax, logits and gradients are float32, products model.dtype",
        off="mu_dtype logits_dot_in_fp32 float32_qk_product activations_in_float32",
        values={
            "grad_dtype": "float32",
            "matmul_precision": "default",
            "cast_logits_to_fp32": True,
        },
        blocks=False,
    ),
    Limit(
        "the mesh has no such axis; use data, stage, fsdp, context, tensor or expert",
        off="custom_mesh_and_rule custom_mesh_and_rule_for_eval",
        values={
            f"{level}_{axis}_parallelism": 1
            for level in ("ici", "dcn")
            for axis in (
                *("diloco", "fsdp_transpose", "context_usp_ulysses", "context_autoregressive"),
                *("tensor_sequence", "autoregressive"),
            )
        },
    ),
    Limit(
        "leave it out; docs/finetuning.md and docs/data.md say what the result may have instead",
        off="use_sft use_chat_template lora_input_adapters_path hf_lora_adapter_path lora_rank "
        "load_full_state_path hf_data_dir enable_rampup_batch_size",
        values={"train_data_columns": ["text"], "tokenize_train_data": True},
    ),
    Limit(
        "leave it out; it has no counterpart",
        off="optimizer_memory_host_offload parameter_memory_host_offload shard_optimizer_over_data "
        "use_dpo use_multimodal use_audio eod_mask_loss enable_diloco enable_streaming_diloco "
        "weight_sparsity_n weight_sparsity_m trainable_parameters_mask reuse_example_batch "
        "adam_eps_root",
        values={"training_objective": "causal_lm"},
    ),
    Limit(
        "documents begin and end with the tokenizer's own tokens, and packing separates them",
        off="use_stream_chunking max_segments_per_seq",
        values=dict.fromkeys(("add_bos", "add_eos", "reset_attention_mask"), True),
        blocks=False,
    ),
    Limit(
        "here initial weights have widths of their own, a layer's input is saved, weight decay "
        "applies to matrices only, wsd falls in a straight line, and steps end a run",
        off="adamw_mask target_eval_loss",
        values={
            "dense_init_scale": 1,
            "decoder_layer_input": "device",
            "wsd_decay_style": "linear",
        },
        blocks=False,
    ),
)
LIMIT_OF = {key: limit for limit in LIMITS for key in limit.keys}


def maxtext_hint(key: str) -> str:
    """Return what to use for a MaxText key; empty if it is not one or ours has the same name."""
    limit = LIMIT_OF.get(key)
    ours, differs, _ = Key(differs=limit.advice) if limit else KEYS.get(key, Key())
    if not differs and (not ours or ours.endswith(f".{key}")):
        return ""
    if not ours:
        return f"MaxText's {key} has no counterpart: {differs}"
    return f"MaxText's {key} is called {ours} here" + (f" ({differs})" if differs else "")


def misspelt(key: str) -> str:
    """Return the translated key of MaxText that a key is almost spelt like; empty if none is."""
    return next(iter(difflib.get_close_matches(key, KEYS, n=1, cutoff=0.9)), "")
