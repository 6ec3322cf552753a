"""Tiny models of each model type: what their config.json says, and their weights from a seed.

Only NumPy is needed. Logits of transformers for them are in `tests/golden/hf`.
"""

import json
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
LENGTH = 40  # tokens of a sequence, longer than every window
POSITIONS = (0, 7, 12, 25, 39)  # of the logits that are stored
NUM_GENERATED = 64  # tokens after those of `tokens`
VOCAB_SIZE = 64

# Training, on which transformers and maxpipe are compared
TRAINED = "gemma2"  # windows, tied embeddings, scaled norms and soft caps
STEPS = 20
ROWS = 8
OPTIMIZER = {
    "learning_rate": 3e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip_norm": 1.0,
}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500_000.0,
}
_BIASED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_nextn_predict_layers": 0,
}
_PHI3 = {"num_key_value_heads": 2, "sliding_window": None, "tie_word_embeddings": False}


def _longrope(original: int) -> dict[str, object]:
    return {
        **_PHI3,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": original,
        },
    }


# name -> (model_type, keys of config.json besides the common ones)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_tied_biases": (
        "llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": _YARN}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_untied": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 8,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": {**_YARN, "attention_factor": 1.2, "beta_fast": 32},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": (
        "phi3",
        {
            **_PHI3,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3_longrope_short": ("phi3", _longrope(128)),
    "phi3_longrope_long": ("phi3", _longrope(32)),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_BIASED,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "routed_scaling_factor": 2.5,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_BIASED,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 8,
            "swiglu_limit": 0.5,
            "rope_parameters": {**_YARN, "rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
}


def keys_of(name: str) -> dict[str, object]:
    """Return what is given to the configuration class of a case's type."""
    return deepcopy({**_COMMON, **CASES[name][1]})  # the class may change what it is given


def tokens() -> np.ndarray:
    """Return the token ids that logits are compared on, int32 [1, T]."""
    return np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, LENGTH)).astype(np.int32)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (tokens, targets) of a training step, int32 [ROWS, T]; four batches in turns."""
    drawn = np.random.default_rng(step % 4).integers(3, VOCAB_SIZE, (ROWS, LENGTH + 1))
    return drawn[:, :-1].astype(np.int32), drawn[:, 1:].astype(np.int32)


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return what the gradient of a tensor is multiplied with, so that one number tells of all."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


def weights(shapes: dict[str, tuple[int, ...]], *, is_gemma: bool) -> dict[str, np.ndarray]:
    """Draw float32 tensors from their names; Gemma's norms multiply by 1 + weight."""

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        values *= 0.3 if len(shape) == 1 else 0.15
        values += 1.0 if "norm" in name and not is_gemma else 0.0
        return values.astype(np.float32)

    return {name: draw(name, tuple(shape)) for name, shape in shapes.items()}


def recorded(name: str) -> dict[str, Any]:
    """Return what transformers had.

    Keys: "config", "shapes"; "logits" [positions][V] of `tokens`, "largest" of all positions;
    "generated", the greedy tokens after them, and "generated_logits", the logit of each;
    "bfloat16_error", the root mean square of what bfloat16 changes, as a share of the logits'.
    """
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
