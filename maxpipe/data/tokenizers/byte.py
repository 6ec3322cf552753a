"""UTF-8 bytes as tokens: 256 bytes, then begin of document, end of document, padding."""

from collections.abc import Sequence

import numpy as np


class ByteTokenizer:
    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Bytes that are not UTF-8, as a model may well produce, become U+FFFD."""
        return bytes(i for i in np.asarray(ids).tolist() if i < 256).decode(
            "utf-8", errors="replace"
        )
