"""Tokenizers; `data.tokenizer` is a name of the catalogue or the path of a tokenizer.json or SentencePiece model."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from maxpipe.config.catalog import TOKENIZERS
from maxpipe.config.imports import implementation

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(Protocol):
    """What the loader needs. Picklable, for worker processes.

    Attributes:
      vocab_size: every id is below it.
      eos_id: ends a document.
      bos_id: begins a document; None if the vocabulary has no such token.
      pad_id: fills sequences; never a target.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int

    def encode(self, text: str) -> "np.ndarray":
        """Token ids, int32 [tokens], without begin or end of document."""
        ...

    def decode(self, ids: "Sequence[int] | np.ndarray") -> str:
        """The text of `ids`; special tokens are left out."""
        ...


@cache
def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` selects; one object per value.

    Raises:
      ConfigError: it is neither a name nor a usable file.
    """
    if name_or_path in TOKENIZERS:
        tokenizer: Tokenizer = implementation(TOKENIZERS[name_or_path])()
        return tokenizer
    if name_or_path.endswith(".model"):
        from maxpipe.data.tokenizers.sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer(name_or_path)
    from maxpipe.data.tokenizers.hugging_face import HuggingFaceTokenizer

    return HuggingFaceTokenizer(name_or_path)
