"""How documents are framed."""

import numpy as np
import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.data.encoding import EncodedDocuments
from maxpipe.data.tokenizers import load_tokenizer

BOS, EOS = 256, 257


def _encode(document: str | np.ndarray) -> np.ndarray:
    return EncodedDocuments([document], load_tokenizer("byte"), vocab_size=259)[0]


def test_text() -> None:
    ids = _encode("hé")
    assert ids.tolist() == [BOS, ord("h"), 0xC3, 0xA9, EOS]
    assert ids.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.int64])
def test_ids_of_any_dtype(dtype: type) -> None:
    ids = _encode(np.array([5, 6], dtype))
    assert ids.tolist() == [BOS, 5, 6, EOS]
    assert ids.dtype == np.int32


def test_frames_already_there_are_kept() -> None:
    assert _encode(np.array([BOS, 5, EOS])).tolist() == [BOS, 5, EOS]


def test_empty() -> None:
    assert _encode("").size == 0


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 259 is too small .* 5 to 300"):
        _encode(np.array([5, 300]))
