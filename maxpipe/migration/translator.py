"""Turn MaxText's values into maxpipe's, with notes, problems and origins."""

from dataclasses import dataclass, field

from maxpipe.config.errors import Problem
from maxpipe.config.maxtext import KEYS, Value
from maxpipe.config.values import is_finite
from maxpipe.migration.read import MaxTextConfig

LONGEST_SHOWN = 60  # characters of a value in a note

# Defaults of MaxText 0.2.5 for keys that a translation reads, except those whose default is False,
# None or, for axes of the mesh, 1.
DEFAULTS: dict[str, Value] = {
    "model_name": "default",
    "decoder_block": "llama2",
    "global_parameter_scale": 1,
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16,
    "head_dim": 128,
    "mlp_activations": ["silu", "linear"],
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "base_moe_mlp_dim": -1,
    "sparse_matmul": True,
    "capacity_factor": -1,
    "attention_type": "global",
    "attn_logits_soft_cap": 0,
    "sliding_window_size": 0,
    "local_rope_max_timescale": -1,
    "rope_linear_scaling_factor": 1,
    "vocab_size": 32_000,
    "dtype": "bfloat16",
    "weight_dtype": "float32",
    "dropout_rate": 0,
    "enable_dropout": True,
    "normalize_embedding_logits": True,
    "z_loss_multiplier": 0,
    "final_logits_soft_cap": 0,
    "num_vocab_tiling": 1,
    "attention": "autoselected",
    "normalization_layer_epsilon": 1e-5,
    "rope_max_timescale": 10_000,
    "rope_type": "default",
    "rope_use_scale": True,
    "dataset_type": "synthetic",
    "grain_file_type": "arrayrecord",
    "grain_worker_count": 1,
    "tokenizer_type": "sentencepiece",
    "packing": True,
    "enable_data_shuffling": True,
    "data_shuffle_seed": 0,
    "init_weights_seed": 0,
    "max_target_length": 2048,
    "per_device_batch_size": 12,
    "eval_per_device_batch_size": 0,
    "gradient_accumulation_steps": 1,
    "steps": 150_001,
    "eval_interval": -1,
    "eval_steps": -1,
    "opt_type": "adamw",
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_weight_decay": 0.1,
    "muon_beta": 0.95,
    "muon_weight_decay": 0,
    "gradient_clipping_threshold": 1,
    "learning_rate": 3e-5,
    "lr_schedule_type": "cosine",
    "learning_rate_final_fraction": 0.1,
    "learning_rate_schedule_steps": -1,
    "warmup_steps_fraction": 0.1,
    "wsd_decay_steps_fraction": 0.1,
    "skip_step_interval": 128,
    "skip_step_scaling_factor": 6,
    "abort_on_nan_loss": True,
    "abort_on_inf_loss": True,
    "enable_checkpointing": True,
    "checkpoint_period": 10_000,
    "log_period": 100,
    "profiler_steps": 5,
    "skip_first_n_steps_for_profiler": 1,
    "jax_cache_dir": "~/jax_cache",
    "hardware": "tpu",
    "compile_topology_num_slices": -1,
    "num_slices": -1,
    "context_parallel_strategy": "all_gather",
    "remat_policy": "full",
    "ici_fsdp_parallelism": -1,
    "dcn_data_parallelism": -1,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_repeats": -1,
    "num_pipeline_microbatches": -1,
    "pipeline_parallel_layers": -1,
    "scan_pipeline_iterations": True,
    "set_remat_policy_on_pipeline_iterations": True,
}


@dataclass
class Translator:
    """A MaxText configuration on its way to one of maxpipe.

    Attributes:
      theirs: MaxText's values.
      num_devices: number of devices over all slices; 0 if it is not known.
      num_slices: number of slices joined by DCN.
      values: value by maxpipe's key.
      origins: maxpipe's key -> MaxText's keys that its value comes from.
      notes: what differs or is left out, one line each.
      problems: what cannot be translated, by MaxText's keys.
      keys_read: MaxText's keys whose values the translation has looked at.
    """

    theirs: MaxTextConfig
    num_devices: int = 0
    num_slices: int = 1
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    keys_read: set[str] = field(default_factory=set)

    def value(self, key: str) -> Value:
        """Return the value of a MaxText key, from its files and words or else its default."""
        self.keys_read.add(key)
        return self.theirs.values[key] if key in self.theirs.values else DEFAULTS.get(key)

    def text(self, key: str) -> str:
        """Return a value as text; None is empty."""
        value = self.value(key)
        return "" if value is None else str(value)

    def is_on(self, key: str) -> bool:
        """Return a value that is true or false; None is false."""
        value = self.value(key)
        if not isinstance(value, bool | None):
            self.refuse(key, f"expected true or false, got {value}")
            return False
        return bool(value)

    def number(self, key: str, default: float = 0) -> float:
        """Return a number; None is the default, and anything else a problem."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"expected a number, got {value}")
            return default
        return value if is_finite(value) else default  # `translate` refuses such values

    def integer(self, key: str, default: int = 0) -> int:
        """Return a whole number; None is the default, and anything else a problem."""
        value = self.number(key, default)
        if value != int(value):
            self.refuse(key, f"expected a whole number, got {value}")
        return int(value)

    def set(self, key: str, value: object, *origins: str) -> None:
        """Give a key of maxpipe its value, which comes from MaxText's keys `origins`."""
        self.values[key] = value
        self.origins[key] = origins

    def copy(self, *keys: str) -> None:
        """Give the counterparts of MaxText's keys the same values, if they have any."""
        for key in keys:
            if self.value(key) is not None:
                self.set(KEYS[key][0], self.value(key), key)

    def note(self, key: str, message: str) -> None:
        """Report a difference that does not stand in the way."""
        self.notes.append(f"{key}={_shown(self.value(key))}: {message}")

    def refuse(self, key: str, message: str) -> None:
        """Report a value that cannot be translated or is not understood."""
        self.problems.append(Problem(key, message, self.theirs.chosen.get(key, "")))


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
