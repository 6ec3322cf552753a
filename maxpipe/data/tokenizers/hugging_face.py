"""A Hugging Face `tokenizer.json`, read by the `tokenizers` library; nothing is downloaded or executed.

The file does not say which of its tokens begin and end a document. `tokenizer_config.json` beside
it does (`bos_token`, `eos_token`, `pad_token`, `add_bos_token`); without one, the names in common
use are tried.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from maxpipe.config.errors import ConfigError, Problem

COMMON_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>")
COMMON_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")


class HuggingFaceTokenizer:
    """See `maxpipe.data.tokenizers.Tokenizer`.

    Args:
      path: a tokenizer.json, or the directory that holds it.

    Raises:
      ConfigError: there is no such file, it is not a tokenizer, or it has no end-of-document token.
    """

    def __init__(self, path: str):
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise _problem(
                f"{path!r} is neither 'byte' nor the path of a tokenizer.json or of a SentencePiece .model"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        # The library raises bare Exception for whatever it cannot parse.
        except Exception as error:
            raise _problem(f"{file} is not a Hugging Face tokenizer.json: {error}") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so that counting them would be too few.
        self.vocab_size = max(vocabulary.values()) + 1
        special = _special_tokens(file.with_name("tokenizer_config.json"), vocabulary)
        if special["eos_token"] not in vocabulary:
            raise _problem(
                f"{file} has no end-of-document token; name its eos_token in tokenizer_config.json beside it"
            )
        self.eos_id = vocabulary[special["eos_token"]]
        self.bos_id = vocabulary.get(special["bos_token"])
        self.pad_id = vocabulary.get(special["pad_token"], self.eos_id)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def _special_tokens(file: Path, vocabulary: dict[str, int]) -> dict[str, str]:
    """The tokens that begin and end a document and pad; "" where there is none."""
    if not file.is_file():
        return {
            "bos_token": next((token for token in COMMON_BOS if token in vocabulary), ""),
            "eos_token": next((token for token in COMMON_EOS if token in vocabulary), ""),
            "pad_token": "",
        }
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _problem(f"{file} is not JSON: {error}") from error
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    if config.get("add_bos_token") is False:
        tokens["bos_token"] = None
    # Older files wrap a token in an object.
    plain = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: token or "" for name, token in plain.items()}


def _problem(message: str) -> ConfigError:
    return ConfigError(Problem("data.tokenizer", message))
