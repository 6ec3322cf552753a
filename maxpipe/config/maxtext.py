"""Map MaxText's keys to ours, for error messages, translation and tables of the documentation.

python -m maxpipe.config.maxtext            print the table
python -m maxpipe.config.maxtext FILE.md    write it between the marks in that file
"""

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

from maxpipe.config.maxtext_limits import IDLE, LIMITS, idle_of, is_other, limit_of

NONE = ""  # our key, where there is no counterpart

SAME_NAMES = ("run_name", "steps")  # keys that both have

# MaxText's key -> our key, and what differs.
KEYS: dict[str, tuple[str, str]] = {
    # pipeline
    "num_layers_per_pipeline_stage": ("pipeline.num_layers_per_stage", "-1 derives it"),
    "num_pipeline_repeats": ("pipeline.num_repeats", ""),
    "pipeline_parallel_layers": (
        "pipeline.parallel_layers",
        "others run after, or before: pipeline.outside_layers",
    ),
    "num_pipeline_microbatches": ("pipeline.num_microbatches", ""),
    "pipeline_delay_activation_forwarding": ("pipeline.delay_activation_forwarding", ""),
    "pipeline_fsdp_ag_once": (
        "pipeline.fsdp_gather",
        "true is written once; gradients are reduced once, too",
    ),
    "model_fsdp_ag_once": ("pipeline.fsdp_gather", "true is written once"),
    "pipeline_fsdp_ag_per_repeat": ("pipeline.fsdp_gather", "true is written per_repeat"),
    "scan_pipeline_iterations": ("pipeline.scan_iterations", ""),
    "scan_pipeline_repeats": (
        "pipeline.scan_repeats",
        "for fsdp_gather per_repeat, once; dead in MaxText",
    ),
    "set_remat_policy_on_pipeline_iterations": ("pipeline.remat_iterations", ""),
    "set_remat_policy_on_layers_per_stage": ("pipeline.remat_layers", "sequential always does"),
    "scan_layers_per_stage": ("pipeline.scan_layers_per_stage", ""),
    "scan_layers": ("pipeline.scan_layers", "for the sequential engine"),
    "param_scan_axis": (NONE, "checkpoints always keep layers in dimension 0"),
    "remat_policy": (
        "pipeline.remat_policy",
        "minimal also keeps context, as MaxText's minimal_with_context does",
    ),
    "query_proj": ("pipeline.remat_tensors.query_proj", "with remat_policy=custom"),
    "key_proj": ("pipeline.remat_tensors.key_proj", "with remat_policy=custom"),
    "value_proj": ("pipeline.remat_tensors.value_proj", "with remat_policy=custom"),
    "context": ("pipeline.remat_tensors.context", "with remat_policy=custom"),
    "attention_out": ("pipeline.remat_tensors.context", "with remat_policy=custom"),
    "out_proj": ("pipeline.remat_tensors.out_proj", "with remat_policy=custom"),
    "mlpwi_0": ("pipeline.remat_tensors.mlp_gate", "with remat_policy=custom"),
    "mlpwi_1": ("pipeline.remat_tensors.mlp_up", "with remat_policy=custom"),
    "mlpwo": ("pipeline.remat_tensors.mlp_down", "with remat_policy=custom"),
    # mesh
    "ici_data_parallelism": ("mesh.ici.data", ""),
    "ici_pipeline_parallelism": ("mesh.ici.stage", ""),
    "ici_fsdp_parallelism": ("mesh.ici.fsdp", "1 unless set, where MaxText has -1"),
    "ici_context_parallelism": ("mesh.ici.context", ""),
    "ici_sequence_parallelism": ("mesh.ici.context", "attention is split, too"),
    "ici_tensor_parallelism": ("mesh.ici.tensor", ""),
    "ici_expert_parallelism": ("mesh.ici.expert", ""),
    "dcn_data_parallelism": ("mesh.dcn.data", "1 unless set, where MaxText has -1"),
    "dcn_pipeline_parallelism": ("mesh.dcn.stage", ""),
    "dcn_fsdp_parallelism": ("mesh.dcn.fsdp", ""),
    "dcn_context_parallelism": ("mesh.dcn.context", ""),
    "dcn_sequence_parallelism": ("mesh.dcn.context", "attention is split, too"),
    "context_parallel_load_balance": (
        NONE,
        "always: each device has an early and a late chunk of a sequence",
    ),
    "context_parallel_strategy": (NONE, "keys and values are gathered"),
    "dcn_tensor_parallelism": ("mesh.dcn.tensor", ""),
    "dcn_expert_parallelism": ("mesh.dcn.expert", ""),
    "mesh_axes": (NONE, "the mesh axes are fixed: data, stage, fsdp, context, tensor, expert"),
    "logical_axis_rules": (
        "sharding.logical_axis_rules",
        "our logical axes; --print-config shows them",
    ),
    "data_sharding": (NONE, "batches are split over data, fsdp and expert"),
    "num_slices": (NONE, "taken from the devices"),
    "hardware": ("mesh.simulated_devices", "cpu: the devices that a CPU pretends to have"),
    # model
    "base_num_decoder_layers": ("model.num_layers", ""),
    "num_decoder_layers": ("model.num_layers", ""),
    "base_emb_dim": ("model.embed_dim", ""),
    "emb_dim": ("model.embed_dim", ""),
    "base_num_query_heads": ("model.num_query_heads", ""),
    "base_num_kv_heads": ("model.num_kv_heads", ""),
    "base_mlp_dim": ("model.mlp_dim", ""),
    "model_name": (NONE, "start from a preset: python -m maxpipe.train configs/models/NAME.yml"),
    "override_model_config": (NONE, "of several values for a key the last one counts"),
    "global_parameter_scale": (NONE, "write the sizes themselves"),
    "decoder_block": (
        "model.block",
        "llama for llama2, mistral, qwen2, qwen3, gemma2, mixtral and qwen3_moe; no others",
    ),
    "head_dim": ("model.head_dim", ""),
    "vocab_size": ("model.vocab_size", ""),
    "dtype": ("model.dtype", ""),
    "weight_dtype": ("model.param_dtype", ""),
    "logits_via_embedding": ("model.tie_embeddings", ""),
    "normalize_embedding_logits": (
        "model.logit_scale",
        "true is written 1 / the root of model.embed_dim, with tied embeddings",
    ),
    "mlp_activations": (
        "model.mlp_activation",
        "silu for [silu, linear], gelu_tanh for [gelu, linear]",
    ),
    "mlp_bias": ("model.mlp_bias", "of experts; MaxText's dense blocks have none"),
    "dropout_rate": ("model.dropout", "the masks lie on the outputs of attention and MLP"),
    "enable_dropout": ("model.dropout", "false is written 0"),
    "z_loss_multiplier": ("model.z_loss", ""),
    "final_logits_soft_cap": (
        "model.logit_soft_cap",
        "0 = no cap, where MaxText has null; it caps logits of tied embeddings only",
    ),
    "num_vocab_tiling": ("model.logit_tiles", ""),
    "use_qk_norm": ("model.qk_norm", ""),
    "attention_bias": ("model.attention_bias", ""),
    "attention_sink": ("model.attention_sinks", ""),
    "attention_type": (
        "model.attention_kind",
        "gqa for global, mla for mla; a window is model.attention_window",
    ),
    "sliding_window_size": (
        "model.attention_window",
        "with model.layer_pattern; MaxText's llama2, mistral, qwen and mixtral blocks have none",
    ),
    "attn_logits_soft_cap": ("model.attention_soft_cap", "0 = no cap, where MaxText has null"),
    "use_post_attn_norm": ("model.norm_placement", "with use_post_ffw_norm: sandwich"),
    "use_post_ffw_norm": ("model.norm_placement", "with use_post_attn_norm: sandwich"),
    "num_experts": ("model.moe.experts", "0 = a dense MLP, where MaxText has 1"),
    "num_experts_per_tok": ("model.moe.per_token", ""),
    "base_moe_mlp_dim": ("model.moe.mlp_dim", "0 = model.mlp_dim"),
    "routed_bias": (
        "model.moe.logit_bias",
        "for mixtral and qwen3_moe; DeepSeek's is model.moe.selection_bias",
    ),
    "capacity_factor": (
        "model.moe.capacity_factor",
        "of whole sequences; 0 = no bound, where MaxText has -1",
    ),
    "attention": ("model.attention", "flash is called splash, autoselected auto"),
    "normalization_layer_epsilon": ("model.norm_eps", ""),
    "rope_max_timescale": ("model.rope_theta", ""),
    "rope_type": (
        "model.rope_scaling.factor",
        "8 for llama3.1, as MaxText has it for model names that begin so; YaRN is not translated",
    ),
    "rope_linear_scaling_factor": (
        "model.rope_scaling.factor",
        "with model.rope_scaling.type=linear",
    ),
    "local_rope_max_timescale": ("model.rope_theta_local", "0 = as global layers, not -1"),
    "rope_use_scale": ("model.rope_scaling.factor", "false is written 1"),
    # data
    "dataset_type": ("data.source", "other sources; --help data.source lists them"),
    "dataset_path": ("data.path", ""),
    "grain_train_files": ("data.path", ""),
    "grain_file_type": ("data.source", "array_record or parquet"),
    "grain_train_mixture_config_path": ("data.mixture", "a list of sources with weights"),
    "hf_train_files": ("data.path", "with data.source=jsonl, parquet or text"),
    "hf_path": ("data.path", "hf:NAME with data.source=datasets; json, parquet, text: a source"),
    "hf_name": ("data.path", "hf:NAME:CONFIGURATION with data.source=datasets"),
    "train_split": ("data.path", "hf:NAME:CONFIGURATION:SPLIT with data.source=datasets"),
    "tokenizer_path": (
        "data.tokenizer",
        "byte, or the path of a tokenizer.json or SentencePiece model",
    ),
    "tokenizer_type": ("data.tokenizer", "told from the file's name"),
    "packing": ("data.packing", ""),
    "max_target_length": ("data.sequence_length", ""),
    "per_device_batch_size": (
        "data.global_batch_size",
        "over all devices: multiply by their number",
    ),
    "eval_per_device_batch_size": (
        "eval.global_batch_size",
        "over all devices: multiply by their number",
    ),
    "gradient_accumulation_steps": (
        "pipeline.num_microbatches",
        "times those of the pipeline; they divide the batch",
    ),
    "grain_worker_count": ("data.num_workers", ""),
    "enable_data_shuffling": ("data.shuffle", ""),
    "data_shuffle_seed": ("seed", "one seed for everything"),
    "init_weights_seed": ("seed", "one seed for everything"),
    # training
    "base_output_directory": ("output_dir", "on a file system; checkpoint.mirror takes a bucket"),
    "opt_type": ("optimizer.name", ""),
    "adam_b1": ("optimizer.beta1", ""),
    "adam_b2": ("optimizer.beta2", ""),
    "adam_eps": ("optimizer.eps", ""),
    "adam_weight_decay": ("optimizer.weight_decay", "matrices only"),
    "muon_beta": (NONE, "muon's momentum is 0.95"),
    "muon_consistent_rms": (NONE, "muon's updates are scaled as with 0.2"),
    "muon_weight_decay": ("optimizer.weight_decay", "matrices only"),
    "gradient_clipping_threshold": ("optimizer.grad_clip_norm", ""),
    "skip_step_on_spikes": ("optimizer.spike_window", "false is written 0"),
    "skip_step_interval": ("optimizer.spike_window", ""),
    "skip_step_scaling_factor": ("optimizer.spike_deviations", ""),
    "abort_on_nan_loss": (
        "optimizer.max_consecutive_skips",
        "such steps are skipped; 0 = a run never ends for that",
    ),
    "abort_on_inf_loss": (
        "optimizer.max_consecutive_skips",
        "such steps are skipped; 0 = a run never ends for that",
    ),
    "learning_rate": ("optimizer.learning_rate", ""),
    "wsd_decay_steps_fraction": (
        "optimizer.stable_fraction",
        "the share after warm-up that is not decay",
    ),
    "lr_schedule_type": ("optimizer.schedule", ""),
    "learning_rate_schedule_steps": ("optimizer.decay_steps", ""),
    "warmup_steps_fraction": ("optimizer.warmup_steps", "in steps"),
    "learning_rate_final_fraction": ("optimizer.final_fraction", ""),
    "cosine_learning_rate_final_fraction": ("optimizer.final_fraction", ""),
    "load_parameters_path": ("init_from", "written maxtext:DIR; of full states too"),
    "enable_checkpointing": ("checkpoint.every", "0 = never"),
    "checkpoint_period": ("checkpoint.every", ""),
    "max_num_checkpoints_to_keep": ("checkpoint.keep", ""),
    "async_checkpointing": (NONE, "checkpoints are always written in the background"),
    "eval_interval": ("eval.every", "0 = never, where MaxText has -1"),
    "eval_steps": ("eval.batches", ""),
    "log_period": ("telemetry.log_every", ""),
    "profiler": ("telemetry.profile_steps", "[first, last]"),
    "profiler_steps": ("telemetry.profile_steps", "[first, last]"),
    "skip_first_n_steps_for_profiler": ("telemetry.profile_steps", "[first, last]"),
    "compile_topology": ("compile.topology", "for maxpipe.compile"),
    "compile_topology_num_slices": ("compile.num_slices", ""),
    "jax_cache_dir": ("compile.cache_dir", "off = none"),
    "base_config": (NONE, "a YAML file inherits with base: other.yml"),
}


def maxtext_hint(key: str) -> str:
    """Return what to use for a MaxText key; empty if it is not one or ours has the same name."""
    if key in KEYS:
        ours, differs = KEYS[key]
        if not ours:
            return f"MaxText's {key} has no counterpart: {differs}"
        if differs:
            return f"MaxText's {key} is called {ours} here ({differs})"
        return "" if ours.endswith(f".{key}") else f"MaxText's {key} is called {ours} here"
    if limit := limit_of(key):
        return f"MaxText's {key} has no counterpart: {limit.advice}"
    if idle := idle_of(key):
        return f"MaxText's {key} plays no part here: {idle.reason}"
    return ""


def unknown_maxtext_key(key: str) -> str:
    """Return the message for a key that is not in MaxText's base.yml, with a similar key if any."""
    # Patterns of other keys fit misspelt ones, too.
    if is_other(key) and not difflib.get_close_matches(key, KEYS, n=1, cutoff=0.92):
        return "is a key of MaxText that is not translated; leave it out"
    near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
    return "is no key of MaxText 0.2.5" + (f"; did you mean {near[0]}?" if near else "")


START, END = "<!-- MaxText keys: start -->", "<!-- MaxText keys: end -->"


def table() -> str:
    """Return all keys as Markdown tables: with a counterpart, with one legal value, idle."""
    translated = [
        f"| `{key}` | {f'`{ours}`' if ours else '-'} | {differs} |"
        for key, (ours, differs) in KEYS.items()
    ]
    limited = [
        f"| {_names(limit.values)} | {limit.advice} | {'refused' if limit.blocks else 'noted'} |"
        for limit in LIMITS
    ]
    idle = [f"| {_names(idle.names.split())} | {idle.reason} |" for idle in IDLE]
    return "\n".join(
        [
            "| MaxText | maxpipe | what differs |",
            "|---|---|---|",
            *translated,
            "",
            "These have no key here. maxpipe does what their default does; `maxpipe.from_maxtext`",
            "refuses or notes another value:",
            "",
            "| MaxText | here | another value |",
            "|---|---|---|",
            *limited,
            "",
            "These play no part, whatever their values:",
            "",
            "| MaxText | why |",
            "|---|---|",
            *idle,
        ]
    )


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def with_table(text: str) -> str:
    """Return `text` with the table between its marks.

    Raises:
      ValueError: the marks are not there.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no marks {START} and {END}")
    return f"{before}{start}\n{table()}\n{end}{after}"


def main() -> None:
    """Print the table, or write it into the file that the command line names."""
    if sys.argv[1:]:
        file = Path(sys.argv[1])
        file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
