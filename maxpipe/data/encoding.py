"""From a document to the token ids a row walks over."""

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.data.documents import Documents
from maxpipe.data.tokenizers import Tokenizer


class EncodedDocuments:
    """Documents as token ids, each framed by begin and end of document.

    Args:
      documents: texts or token ids.
      tokenizer: encodes texts; its ids frame both.
      vocab_size: ids must be below it; JAX would clamp larger ones silently.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, vocab_size: int):
        self._documents = documents
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> np.ndarray:
        """[bos?, tokens..., eos], int32; empty if the document has no tokens.

        Raises:
          ConfigError: a token id is outside the vocabulary.
        """
        document = self._documents[index]
        ids = (
            self._tokenizer.encode(document) if isinstance(document, str) else np.asarray(document)
        )
        if ids.size == 0:
            return np.empty(0, np.int32)
        if ids.max() >= self._vocab_size or ids.min() < 0:
            message = (
                f"{self._vocab_size} is too small for the data: a document holds token ids {ids.min()} to "
                f"{ids.max()}; raise it, or check that data.tokenizer made these tokens"
            )
            raise ConfigError(Problem("model.vocab_size", message))
        bos, eos = self._tokenizer.bos_id, self._tokenizer.eos_id
        before = [] if bos is None or ids[0] == bos else [bos]
        after = [] if ids[-1] == eos and ids.size + len(before) > 1 else [eos]
        return np.concatenate(
            [before, ids.astype(np.int32), after], dtype=np.int32, casting="unsafe"
        )
