"""Translate the model, data, optimizer, checkpoints and telemetry."""

import os
import re

from maxpipe.migration.translator import Translator

BLOCKS = ("llama2", "mistral", "qwen2", "qwen3")  # all are the block `llama` here
READS_QK_NORM = ("qwen2", "qwen3")
READS_BIAS = ("qwen2",)
KERNELS = {"autoselected": "auto", "dot_product": "dot_product", "flash": "splash"}
LEAST_BYTE_VOCABULARY = 259  # ids of data.tokenizer=byte, which synthetic data is checked against
MUON_MOMENTUM = 0.95
MUON_RMS = 0.2
HF_READERS = {"json": "jsonl", "parquet": "parquet", "text": "text"}
GRAIN_READERS = {"arrayrecord": "array_record", "parquet": "parquet"}


def translate_model(t: Translator) -> None:
    """Set the model's shape and the switches of its block."""
    block = t.text("decoder_block")
    if block not in BLOCKS:
        t.refuse("decoder_block", f"{block} has no counterpart; there are {', '.join(BLOCKS)}")
        return
    for key, ours, doublings in zip(*_sizes(), _doublings(t), strict=True):
        t.set(f"model.{ours}", 2**doublings * t.integer(key), key)
    t.copy(
        "head_dim",
        "vocab_size",
        "dtype",
        "weight_dtype",
        "logits_via_embedding",
        "z_loss_multiplier",
        "num_vocab_tiling",
        "normalization_layer_epsilon",
        "rope_max_timescale",
    )
    t.set("model.logit_soft_cap", t.number("final_logits_soft_cap"), "final_logits_soft_cap")
    dropout = t.number("dropout_rate") if t.is_on("enable_dropout") else 0
    t.set("model.dropout", dropout, "dropout_rate", "enable_dropout")
    if dropout:
        t.note("dropout_rate", "the masks lie on the outputs of attention and MLP")
    for key, readers in (("use_qk_norm", READS_QK_NORM), ("attention_bias", READS_BIAS)):
        if t.is_on(key) and block in readers:
            t.copy(key)
        elif t.is_on(key):
            t.note(key, f"left out: MaxText's decoder_block={block} does not read it")
    if t.is_on("logits_via_embedding") and t.is_on("normalize_embedding_logits"):
        message = "MaxText divides the logits of tied embeddings by a root of the width; set false"
        t.refuse("normalize_embedding_logits", message)
    attention = t.text("attention")
    t.set("model.attention", KERNELS.get(attention, "auto"), "attention")
    if attention not in KERNELS or (attention == "flash" and t.text("hardware") != "tpu"):
        t.set("model.attention", "auto", "attention")
        t.note("attention", "model.attention=auto picks a kernel by backend")
    _translate_rope(t)


def _sizes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return MaxText's keys that the scale multiplies, and the names of ours."""
    names = ("emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_decoder_layers")
    ours = ("embed_dim", "num_query_heads", "num_kv_heads", "mlp_dim", "num_layers")
    return tuple(f"base_{name}" for name in names), ours


def _doublings(t: Translator) -> tuple[int, ...]:
    """Return how often `global_parameter_scale` doubles each of `_sizes()`."""
    scale = t.integer("global_parameter_scale", 1)
    if scale < 1 or scale.bit_count() != 1:
        t.refuse("global_parameter_scale", f"expected a power of two, got {scale}")
        return (0,) * 5
    every, left = divmod(scale.bit_length() - 1, 3)
    width, heads = every + (left > 1), every + (left > 0)
    return width, heads, heads, heads, every


def _translate_rope(t: Translator) -> None:
    """Set Llama 3.1's scaling, which MaxText has for model names that begin so."""
    kind = t.text("rope_type")
    if t.text("model_name").startswith("llama3.1") or kind.startswith("llama3.1"):
        if t.is_on("rope_use_scale"):
            scaling = {
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position": 8192,
            }
            for name, value in scaling.items():
                t.set(f"model.rope_scaling.{name}", value, "rope_type", "model_name")
    elif kind != "default":
        t.refuse("rope_type", f"{kind} has no counterpart; use default or llama3.1")


def translate_data(t: Translator) -> None:
    """Set the data source, tokenizer, sequences and evaluations."""
    t.copy("max_target_length", "packing", "enable_data_shuffling", "init_weights_seed")
    if t.integer("data_shuffle_seed") != t.integer("init_weights_seed"):
        t.note("data_shuffle_seed", "left out: one seed, that of init_weights_seed, does for both")
    match t.text("dataset_type"):
        case "synthetic":
            t.set("data.source", "synthetic", "dataset_type")
            if 0 < t.integer("vocab_size") < LEAST_BYTE_VOCABULARY:
                message = f"must be at least {LEAST_BYTE_VOCABULARY}, that of data.tokenizer=byte"
                t.refuse("vocab_size", message)
        case "hf":
            _translate_hf(t)
            _translate_tokenizer(t)
        case "grain":
            _translate_grain(t)
            _translate_tokenizer(t)
        case kind:
            message = (
                f"{kind} is not read; use dataset_type=grain with grain_file_type=arrayrecord or "
                "parquet, or dataset_type=hf with hf_path=json, parquet or text, or synthetic"
            )
            t.refuse("dataset_type", message)
    _translate_eval(t)


def _translate_hf(t: Translator) -> None:
    path, files = t.text("hf_path"), t.value("hf_train_files")
    if path not in HF_READERS:
        message = (
            f"{path or 'nothing'} is a dataset of the Hugging Face hub: download its files and "
            f"give hf_path={', '.join(HF_READERS)} and hf_train_files=PATHS"
        )
        t.refuse("hf_path", message)
        return
    if not files:
        t.refuse("hf_train_files", "names no files; give paths or globs, separated by commas")
    t.set("data.source", HF_READERS[path], "hf_path")
    names = files if isinstance(files, list) else [str(files)]
    t.set("data.path", ",".join(map(str, names)), "hf_train_files")


def _translate_grain(t: Translator) -> None:
    files, kind = t.text("grain_train_files"), t.text("grain_file_type")
    if t.text("grain_train_mixture_config_path") or ";" in files:
        key = "grain_train_files" if ";" in files else "grain_train_mixture_config_path"
        t.refuse(key, "a mixture is written as data.mixture in the result: give one source here")
    elif not files:
        t.refuse("grain_train_files", "names no files; give a path or a glob")
    if kind not in GRAIN_READERS:
        t.refuse("grain_file_type", f"{kind} is not read; use {' or '.join(GRAIN_READERS)}")
        return
    t.set("data.source", GRAIN_READERS[kind], "grain_file_type")
    t.set("data.path", files, "grain_train_files")
    t.set("data.num_workers", max(0, t.integer("grain_worker_count")), "grain_worker_count")


def _translate_tokenizer(t: Translator) -> None:
    path = t.text("tokenizer_path")
    inside = os.path.join(os.path.expanduser(path), "tokenizer.json")
    if path and os.path.isfile(inside):
        path = inside
    if path.endswith((".json", ".model")):
        t.set("data.tokenizer", path, "tokenizer_path")
        return
    advice = {
        "huggingface": "download tokenizer.json from the Hugging Face hub and give its path",
        "sentencepiece": "give the path of a SentencePiece model whose name ends in .model",
    }.get(t.text("tokenizer_type"), "give the path of a tokenizer.json")
    t.refuse("tokenizer_path", f"{path or 'nothing'} is no local tokenizer: {advice}")


def _translate_eval(t: Translator) -> None:
    every = max(0, t.integer("eval_interval"))
    t.set("eval.every", every, "eval_interval")
    if not every:
        return
    if t.integer("eval_steps") > 0:
        t.copy("eval_steps")
    else:
        t.note("eval_steps", "an evaluation has eval.batches batches, 2 unless set")
    for key in ("hf_eval_files", "grain_eval_files"):
        if t.text(key):
            t.note(key, "left out: data.eval_fraction of the training documents are set aside")


def translate_optimizer(t: Translator) -> None:
    """Set the optimizer and its learning rate over the steps."""
    name = t.text("opt_type")
    if name not in ("adamw", "muon", "sgd"):
        t.refuse("opt_type", f"{name} has no counterpart; use adamw, muon or sgd")
        return
    t.copy("opt_type", "learning_rate", "learning_rate_final_fraction")
    t.copy("gradient_clipping_threshold")
    if name == "sgd":
        t.set("optimizer.beta1", 0, "opt_type")
        t.set("optimizer.weight_decay", 0, "opt_type")
    else:
        t.copy("adam_b1", "adam_b2", "adam_eps")
        decay = "muon_weight_decay" if name == "muon" else "adam_weight_decay"
        t.copy(decay)
        if t.number(decay):
            t.note(decay, "decays matrices only; MaxText decays norms as well")
    if name == "muon":
        for key, value in (("muon_beta", MUON_MOMENTUM), ("muon_consistent_rms", MUON_RMS)):
            if t.number(key) != value:
                t.refuse(key, f"must be {value}, which is what muon has here")
    _translate_schedule(t)
    if t.is_on("skip_step_on_spikes"):
        t.copy("skip_step_interval", "skip_step_scaling_factor")
    if not t.is_on("abort_on_nan_loss") and not t.is_on("abort_on_inf_loss"):
        t.set("optimizer.max_consecutive_skips", 0, "abort_on_nan_loss", "abort_on_inf_loss")


def _translate_schedule(t: Translator) -> None:
    decay_steps, steps = t.integer("learning_rate_schedule_steps", -1), t.integer("steps", -1)
    if decay_steps == -1:
        decay_steps = steps
    if steps == -1:
        steps = decay_steps
    t.set("steps", steps, "steps")
    t.set("optimizer.decay_steps", decay_steps, "learning_rate_schedule_steps")
    if steps > decay_steps:
        message = "steps after the schedule keep its last learning rate, where MaxText has 0"
        t.note("learning_rate_schedule_steps", message)
    warmup = int(decay_steps * t.number("warmup_steps_fraction"))
    t.set("optimizer.warmup_steps", warmup, "warmup_steps_fraction")
    kind = t.text("lr_schedule_type")
    if kind not in ("cosine", "wsd"):
        t.refuse("lr_schedule_type", f"{kind} is not cosine or wsd")
        return
    t.copy("lr_schedule_type")
    if kind == "wsd":
        decay = int(decay_steps * t.number("wsd_decay_steps_fraction"))
        stable = 1 - decay / max(1, decay_steps - warmup)
        t.set("optimizer.stable_fraction", round(stable, 9), "wsd_decay_steps_fraction")


def translate_run(t: Translator) -> None:
    """Set the run's name and directory, checkpoints, traces and the compilation cache."""
    name = t.text("run_name") or t.text("model_name").replace("default", "maxtext")
    t.set("run_name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-"), "run_name")
    directory = t.text("base_output_directory")
    if "://" in directory:
        t.set("checkpoint.mirror", directory.rstrip("/"), "base_output_directory")
        message = "the run's directory is local, output_dir, and its checkpoints are copied there"
        t.note("base_output_directory", message)
    elif directory:
        t.set("output_dir", directory, "base_output_directory")
    _translate_checkpoints(t)
    t.copy("log_period")
    profiler, steps = t.text("profiler"), t.integer("steps", -1)
    if profiler == "xplane":
        first = t.integer("skip_first_n_steps_for_profiler") + 1
        last = min(first + t.integer("profiler_steps") - 1, steps) if steps > 0 else first
        t.set("telemetry.profile_steps", [first, last], "profiler", "profiler_steps")
    elif profiler:
        t.note("profiler", "left out: telemetry.profile_steps writes traces of JAX's profiler")
    cache = t.text("jax_cache_dir")
    if cache != "~/jax_cache":
        t.set("compile.cache_dir", os.path.expanduser(cache) or "off", "jax_cache_dir")


def _translate_checkpoints(t: Translator) -> None:
    every = t.integer("checkpoint_period") if t.is_on("enable_checkpointing") else 0
    t.set("checkpoint.every", every, "enable_checkpointing", "checkpoint_period")
    if not every:
        return
    if t.value("max_num_checkpoints_to_keep") is None:
        t.set("checkpoint.keep_every", every, "max_num_checkpoints_to_keep")
    else:
        t.copy("max_num_checkpoints_to_keep")
