"""Tiny models of each model type: `tests/golden/hf/cases.yml`, and their weights from a seed.

Logits of transformers for them are in `tests/golden/hf`.
"""

import json
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import yaml

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

_FILE = yaml.safe_load((GOLDEN / "cases.yml").read_text(encoding="utf-8"))
# name -> (model_type, keys of config.json besides the common ones)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    name: (keys.pop("model_type"), keys) for name, keys in _FILE["cases"].items()
}


def keys_of(name: str) -> dict[str, object]:
    """Return what is given to the configuration class of a case's type."""
    return deepcopy({**_FILE["common"], **CASES[name][1]})  # the class may change what it is given


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
