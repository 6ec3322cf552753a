"""A SentencePiece model (`tokenizer.model`), read by the `sentencepiece` library."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional


class SentencePieceTokenizer:
    """See `maxpipe.data.tokenizers.Tokenizer`.

    Args:
      path: a SentencePiece model.

    Raises:
      ConfigError: there is no such file, it is no model or has no end-of-document token, or the
        library is not installed.
    """

    def __init__(self, path: str):
        with optional("sentencepiece", "data", "data.tokenizer"):
            import sentencepiece
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(Problem("data.tokenizer", f"there is no file {path!r}"))
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                Problem("data.tokenizer", f"{path} is no SentencePiece model: {error}")
            ) from error
        self.vocab_size = self._model.vocab_size()
        self.eos_id = self._model.eos_id()
        if self.eos_id < 0:
            raise ConfigError(
                Problem(
                    "data.tokenizer", f"{path} has no end-of-document token; train it with eos_id"
                )
            )
        self.bos_id = _or_none(self._model.bos_id())
        pad_id = _or_none(self._model.pad_id())
        self.pad_id = self.eos_id if pad_id is None else pad_id

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._model.decode([i for i in np.asarray(ids).tolist() if i < self.vocab_size])


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None
