"""Steps that MaxText has written, and the logits that it has with them; no import of MaxText."""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "maxtext"
LOGITS = "logits.json"
STEP = 2
LENGTH = 24  # tokens

# MaxText's keys that all models have
COMMON = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 3,
    "vocab_size": 32,
    "max_target_length": LENGTH,
    "dtype": "float32",
    "weight_dtype": "float32",
    "normalize_embedding_logits": False,
}
# What differs: scanned or not, along which axis, how arrays are written, rotations, biases, norms.
# The first one's step has moments of the optimizer, too.
CASES: dict[str, dict[str, object]] = {
    "llama2": {},
    "llama3": {
        "rope_type": "llama3.1",
        "rope_max_timescale": 500_000,
        "logits_via_embedding": True,
        "scan_layers": False,
        "opt_type": "sgd",
    },
    "qwen2": {
        "decoder_block": "qwen2",
        "attention_bias": True,
        "param_scan_axis": 0,
        "opt_type": "sgd",
        "checkpoint_storage_use_ocdbt": False,
        "checkpoint_storage_use_zarr3": False,
    },
    "qwen3": {
        "decoder_block": "qwen3",
        "use_qk_norm": True,
        "scan_layers": False,
        "opt_type": "sgd",
        "weight_dtype": "bfloat16",
    },
}


def tokens() -> np.ndarray:
    """Return the text of the logits, int32 [1, LENGTH]."""
    vocabulary = COMMON["vocab_size"]
    assert isinstance(vocabulary, int)
    return np.random.default_rng(0).integers(1, vocabulary, (1, LENGTH), np.int32)
