"""Turn text into token ids and back: bytes, SentencePiece models and Hugging Face files.

`data.tokenizer` is a name in the catalogue, `ids:N`, the path or URL of a tokenizer.json or
SentencePiece model, or a model's folder, as in `maxpipe.config.model_places`. The libraries are
imported when a file needs them.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from os.path import isdir, isfile
from pathlib import Path
from typing import Protocol

import numpy as np

from maxpipe.config.catalog import TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation, optional
from maxpipe.config.model_places import num_plain_ids, open_folder, tokenizer_folder, tokenizer_path
from maxpipe.config.sections import ModelConfig
from maxpipe.data.tokenizer_json import (
    CONVERT,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    Frame,
    HuggingFaceTokenizer,
)

TOKENIZER = "tokenizer"  # directory of a run with copies of its tokenizer's files
CHAT_TEMPLATE = "chat_template.jinja"
_BESIDE = (TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS_MAP)  # files next to a tokenizer's own


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer; picklable, for worker processes."""

    # Bytes of text that each id stands for, int32 [vocab_size], 0 for special ids; None if they are
    # not known exactly.
    token_bytes: np.ndarray | None
    vocab_size: int  # exclusive upper bound of ids
    eos_id: int  # ends a document
    bos_id: int | None  # begins a document, if the vocabulary has such a token
    pad_id: int  # fills sequences; never a target

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, int32 [tokens], without begin or end of document."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` without special tokens."""
        ...


class OffsetTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows which characters of a text each token stands for."""

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int32 [tokens], and first character and end of each,
        int64 [tokens, 2].
        """
        ...


@cache
def load_tokenizer(name_or_path: str, cache_dir: str = "") -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` selects; one object per value.

    Files of object stores are copied to `data.cache_dir`. Raises ConfigError if it is neither a
    name nor a usable file.
    """
    if name_or_path in TOKENIZERS:
        tokenizer: Tokenizer = implementation(TOKENIZERS[name_or_path])()
        return tokenizer
    if num_ids := num_plain_ids(name_or_path):
        return PlainIds(num_ids)
    path = _local_path(name_or_path, cache_dir)
    return SentencePieceTokenizer(path) if path.endswith(".model") else HuggingFaceTokenizer(path)


def tokenizer_files(name_or_path: str, cache_dir: str = "") -> list[Path]:
    """Return the files that make up a tokenizer, existing or not; empty for one that has none.

    `load_tokenizer`, whose arguments and errors these are, finds them under the same names when
    they are copied to another directory.
    """
    if name_or_path in TOKENIZERS or num_plain_ids(name_or_path):
        return []
    file = Path(_local_path(name_or_path, cache_dir))
    if file.suffix == ".model":
        return [file]
    file = file / "tokenizer.json" if isdir(file) else file
    others = map(file.with_name, (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP))
    return [file, *filter(isfile, others)]


def template_files(name_or_path: str, cache_dir: str = "") -> list[Path]:
    """Return the files of a tokenizer that may say what its chat template is, where they exist;
    arguments and errors are those of `load_tokenizer`.
    """
    if name_or_path in TOKENIZERS or num_plain_ids(name_or_path):
        return []
    path = Path(_local_path(name_or_path, cache_dir))
    directory = path if path.is_dir() else path.parent
    return [directory / name for name in _BESIDE if (directory / name).exists()]


@cache
def _local_path(value: str, cache_dir: str) -> str:
    """Return a tokenizer's path on this machine, after copying it if it is elsewhere."""
    path = tokenizer_path(value)
    folder = tokenizer_folder(value)
    if not folder:
        return path
    name = path.rpartition("/")[2]
    try:
        directory = open_folder(folder, "data.tokenizer").fetch((name, *_BESIDE), cache_dir)
        is_there = (directory / name).is_file()
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise _problem(f"there is no {name} in {folder}")
    return str(directory / name)


def needed_ids(tokenizer: Tokenizer, model: ModelConfig) -> int:
    """Return how many token ids a tokenizer needs a model to have.

    A Hugging Face model keeps its vocabulary, and may lack ids for added tokens of its tokenizer,
    such as one that stands for an image. Texts with them are refused when they are read.
    """
    if model.from_hf and isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.needed_vocab_size
    return tokenizer.vocab_size


def main_file(files: Sequence[Path]) -> Path | None:
    """Return the file of a run's tokenizer that `load_tokenizer` takes; None if there is none."""
    return next((file for file in files if file.name not in _BESIDE), None)


def frame_of(tokenizer: Tokenizer) -> Frame:
    """Return what surrounds the documents of a tokenizer, in training and in every command.

    A tokenizer.json defines the ids before a text. Other tokenizers put the begin of document
    there, if they have one.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.frame
    return Frame([] if tokenizer.bos_id is None else [tokenizer.bos_id], tokenizer.eos_id)


def earlier_frame_of(tokenizer: Tokenizer) -> Frame:
    """Return what surrounded documents in training before runs recorded it."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.earlier_frame
    return frame_of(tokenizer)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that a model is to continue: those of a document that begins
    with it.
    """
    ids: list[int] = tokenizer.encode(text).tolist()
    begin = frame_of(tokenizer).begin
    return ids if ids[: len(begin)] == begin else begin + ids


def without_special_tokens(tokenizer: Tokenizer, text: str) -> str:
    """Return a text without the special tokens that a user has written in it, such as those of a
    chat template.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for token in tokenizer.special_tokens:
            text = text.replace(token, "")
    return text


def decode_all(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """Return the text of `ids`, including special tokens, as a chat template may write."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.decode_with_special_tokens(ids)
    return tokenizer.decode(ids)


class ByteTokenizer:
    """UTF-8 bytes as tokens: 256 bytes, then begin of document, end of document, padding."""

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258
    token_bytes: np.ndarray | None = np.array([1] * 256 + [0] * 3, np.int32)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the text, int32 [bytes], and first character and end of each."""
        lengths = [len(character.encode("utf-8")) for character in text]
        characters = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        content = bytes(token for token in np.asarray(ids).tolist() if token < 256)
        return content.decode("utf-8", errors="replace")


class PlainIds:
    """Ids that stand for no text, for random data; the last one ends a document.

    A text is their numbers, such as `3 1 4`.
    """

    bos_id: int | None = None
    token_bytes: np.ndarray | None = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eos_id = self.pad_id = vocab_size - 1

    def encode(self, text: str) -> np.ndarray:
        """Return the ids whose numbers are in the text, int32 [ids]; raises ConfigError for words
        that are not ids.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise _problem(
                    f"{word[:20]!r} is not one of {self.vocab_size} ids, which stand for no text: "
                    f'data.tokenizer=ids:{self.vocab_size} reads their numbers, such as "0 1 0"'
                )
        return np.array(words, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(token) for token in np.asarray(ids).tolist() if token != self.eos_id)


class SentencePieceTokenizer:
    """A SentencePiece model (`tokenizer.model`), read by the `sentencepiece` library.

    Its pieces stand for normalised text, so the number of bytes of a token is not known exactly.
    Raises ConfigError if the file is no model or has no end-of-document token.
    """

    token_bytes: np.ndarray | None = None

    def __init__(self, path: str):
        with optional("sentencepiece", "data", "data.tokenizer"):
            import sentencepiece
        file = Path(path)
        if not isfile(file):
            raise _problem(f"there is no file {path!r}")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise _problem(f"{path} is no SentencePiece model: {error}; {CONVERT}") from error
        self.vocab_size = self._model.vocab_size()
        self.eos_id = self._model.eos_id()
        if self.eos_id < 0:
            raise _problem(f"{path} has no end-of-document token; train it with eos_id")
        # The library gives -1 for a token that the model does not have.
        bos_id = self._model.bos_id()
        pad_id = self._model.pad_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.pad_id = pad_id if pad_id >= 0 else self.eos_id

    @property
    def vocabulary(self) -> Mapping[str, int]:
        return {self._model.id_to_piece(i): i for i in range(self.vocab_size)}

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = [token for token in np.asarray(ids).tolist() if token < self.vocab_size]
        return self._model.decode(known)


def _problem(message: str) -> ConfigError:
    return ConfigError(Problem("data.tokenizer", message))
