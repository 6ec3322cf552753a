"""Random tokens: for measuring speed, with no files and no tokenizing."""

import numpy as np

from maxpipe.config.sections import DataConfig
from maxpipe.data.tokenizers import load_tokenizer

NUM_DOCUMENTS = 1 << 16


class SyntheticDocuments:
    """Documents of 1 to `max_tokens` tokens, drawn uniformly; document i is a pure function of i.

    Args:
      vocab_size: tokens are below it.
      eos_id: never drawn.
      max_tokens: longest document.
    """

    def __init__(self, vocab_size: int, eos_id: int, max_tokens: int):
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids, int32 [tokens]."""
        random = np.random.default_rng(index)
        ids = random.integers(
            self._vocab_size - 1, size=random.integers(1, self._max_tokens, endpoint=True)
        )
        return (ids + (ids >= self._eos_id)).astype(np.int32)


def build(config: DataConfig) -> SyntheticDocuments:
    """Documents of one data.sequence_length on average; `data.path` is not used."""
    tokenizer = load_tokenizer(config.tokenizer)
    return SyntheticDocuments(tokenizer.vocab_size, tokenizer.eos_id, 2 * config.sequence_length)
