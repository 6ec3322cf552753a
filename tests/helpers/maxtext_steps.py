"""Steps that MaxText has written, and the logits that it has with them; no import of MaxText."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

GOLDEN = Path(__file__).parents[1] / "golden" / "maxtext"
LOGITS = "logits.json"
STEP = 2
_FILE = yaml.safe_load((GOLDEN / "cases.yml").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = _FILE["common"]
CASES: dict[str, dict[str, object]] = _FILE["cases"]


def tokens() -> np.ndarray:
    """Return the text of the logits, int32 [1, max_target_length]."""
    vocabulary, length = COMMON["vocab_size"], COMMON["max_target_length"]
    return np.random.default_rng(0).integers(1, vocabulary, (1, length), np.int32)
