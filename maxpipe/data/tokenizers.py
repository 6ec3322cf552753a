"""Turn text into token ids and back: bytes, SentencePiece models and Hugging Face files.

`data.tokenizer` is a name in the catalogue, `ids:N`, the path or URL of a tokenizer.json or
SentencePiece model, or a model's folder, as in `maxpipe.config.model_places`. The libraries are
imported when a file needs them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxpipe.config.catalog import TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation, optional
from maxpipe.config.model_places import (
    num_plain_ids,
    open_folder,
    tokenizer_folder,
    tokenizer_path,
)
from maxpipe.config.sections import ModelConfig

TOKENIZER = "tokenizer"  # directory of a run with copies of its tokenizer's files
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Tried in this order if no tokenizer_config.json names the tokens.
COMMON_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>")
COMMON_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer; picklable, for worker processes.

    Attributes:
      vocab_size: exclusive upper bound of ids.
      eos_id: id that ends a document.
      bos_id: id that begins a document; None if the vocabulary has no such token.
      pad_id: id that fills sequences; never a target.
      token_bytes: number of text bytes that each id stands for, int32 [vocab_size], 0 for special
        ids; None if they are not known exactly.
    """

    token_bytes: np.ndarray | None
    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int

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

    Args:
      name_or_path: `data.tokenizer`.
      cache_dir: `data.cache_dir`, to which files of object stores are copied.

    Raises:
      ConfigError: it is neither a name nor a usable file.
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

    `load_tokenizer` finds them under the same names when they are copied to another directory.
    Arguments are as for `load_tokenizer`.

    Raises:
      ConfigError: an object store or the hub cannot be read.
    """
    if name_or_path in TOKENIZERS or num_plain_ids(name_or_path):
        return []
    file = Path(_local_path(name_or_path, cache_dir))
    if file.suffix == ".model":
        return [file]
    file = file / "tokenizer.json" if isdir(file) else file
    config = file.with_name(TOKENIZER_CONFIG)
    return [file, config] if isfile(config) else [file]


class TemplateFiles(NamedTuple):
    """The files of a tokenizer that may hold its chat template; None for one that is missing.

    Attributes:
      config: tokenizer_config.json.
      template: chat_template.jinja, which takes precedence.
    """

    config: Path | None
    template: Path | None


def template_files(name_or_path: str, cache_dir: str = "") -> TemplateFiles:
    """Return where the chat template of a tokenizer may be; arguments as for `load_tokenizer`.

    Raises:
      ConfigError: an object store or the hub cannot be read.
    """
    if name_or_path in TOKENIZERS or num_plain_ids(name_or_path):
        return TemplateFiles(None, None)
    if folder := tokenizer_folder(name_or_path):
        directory = open_folder(folder, "data.tokenizer").fetch(
            (TOKENIZER_CONFIG, CHAT_TEMPLATE), cache_dir
        )
    else:
        path = Path(tokenizer_path(name_or_path))
        directory = path if path.is_dir() else path.parent
    files = (directory / TOKENIZER_CONFIG, directory / CHAT_TEMPLATE)
    return pick_template_files([file for file in files if file.exists()])


def pick_template_files(files: Sequence[Path]) -> TemplateFiles:
    """Return which of the files of a tokenizer or model may hold its chat template."""
    by_name = {file.name: file for file in files}
    return TemplateFiles(by_name.get(TOKENIZER_CONFIG), by_name.get(CHAT_TEMPLATE))


@cache
def _local_path(value: str, cache_dir: str) -> str:
    """Return a tokenizer's path on this machine, after copying it if it is elsewhere."""
    path = tokenizer_path(value)
    folder = tokenizer_folder(value)
    if not folder:
        return path
    name = path.rpartition("/")[2]
    try:
        directory = open_folder(folder, "data.tokenizer").fetch((name, TOKENIZER_CONFIG), cache_dir)
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


def extends(tokenizer: Tokenizer, base: Tokenizer) -> bool:
    """Return whether a tokenizer gives every token of another the same id."""
    if tokenizer is base:
        return True
    ours, theirs = (getattr(each, "vocabulary", {}) for each in (tokenizer, base))
    return bool(theirs) and theirs.items() <= ours.items()


def unknown_tokens(tokenizer: Tokenizer, model: ModelConfig) -> list[str]:
    """Return a fitting tokenizer's added tokens that the model has no ids for."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.tokens_from(model.num_token_ids)
    return []


def main_file(files: Sequence[Path]) -> Path | None:
    """Return the file of a run's tokenizer that `load_tokenizer` takes; None if there is none."""
    return next(
        (file for file in files if file.name not in (TOKENIZER_CONFIG, CHAT_TEMPLATE)), None
    )


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that a model is to continue.

    A tokenizer.json defines which special tokens surround a text. Other tokenizers put the begin
    of document before it, if they have one.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.encode_with_special_tokens(text)
    ids = tokenizer.encode(text).tolist()
    if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]:
        return ids
    return [tokenizer.bos_id, *ids]


def without_special_tokens(tokenizer: Tokenizer, text: str) -> str:
    """Return a text without the special tokens that a user has written in it, such as those of a
    chat template.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for token in tokenizer.special_tokens:
            text = text.replace(token, "")
    return text


def decode_all(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """Return the text of `ids`, including any special tokens that a chat template may write."""
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
        """Return the bytes of the text, int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the text, int32 [bytes], and first character and end of each."""
        lengths = [len(character.encode("utf-8")) for character in text]
        characters = np.repeat(np.arange(len(text)), lengths)
        return self.encode(text), np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        content = bytes(token for token in np.asarray(ids).tolist() if token < 256)
        return content.decode("utf-8", errors="replace")


class PlainIds:
    """Ids that stand for no text, for random data; the last one ends a document.

    A text is their numbers, such as `3 1 4`.

    Args:
      vocab_size: number of ids, at least 2.
    """

    bos_id: int | None = None
    token_bytes: np.ndarray | None = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eos_id = self.pad_id = vocab_size - 1

    def encode(self, text: str) -> np.ndarray:
        """Return the ids whose numbers are in the text, int32 [ids].

        Raises:
          ConfigError: the text has words that are not ids.
        """
        words = text.split()
        other = next((word for word in words if not self._is_id(word)), None)
        if other is not None:
            raise _problem(
                f"{other[:20]!r} is not one of {self.vocab_size} ids, which stand for no text: a "
                f'text of data.tokenizer=ids:{self.vocab_size} is their numbers, such as "0 1 0"'
            )
        return np.array(words, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the numbers of the ids, without ends of documents."""
        return " ".join(str(token) for token in np.asarray(ids).tolist() if token != self.eos_id)

    def _is_id(self, word: str) -> bool:
        return word.isascii() and word.isdigit() and int(word) < self.vocab_size


class SentencePieceTokenizer:
    """A SentencePiece model (`tokenizer.model`), read by the `sentencepiece` library.

    Its pieces stand for normalised text, so the number of bytes of a token is not known exactly.

    Raises:
      ConfigError: there is no such file, it is not a model or has no end-of-document token, or the
        library is not installed.
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
            raise _problem(f"{path} is no SentencePiece model: {error}") from error
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
        """Return the id of each piece."""
        return {self._model.id_to_piece(i): i for i in range(self.vocab_size)}

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, int32 [tokens]."""
        return np.array(self._model.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids that the model knows."""
        return self._model.decode(
            [token for token in np.asarray(ids).tolist() if token < self.vocab_size]
        )


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` library without running code.

    The file does not say which of its tokens begin and end a document. `tokenizer_config.json` next
    to it does (`bos_token`, `eos_token`, `pad_token`, `add_bos_token`); without one, common names
    are tried, and likewise for an `eos_token` that it leaves out.

    Truncation and padding lengths that the script that saved the file may have left in it are
    ignored: a text has all of its tokens and no others.

    Args:
      path: a tokenizer.json, or the directory that holds it.

    Raises:
      ConfigError: there is no such file, it is not a tokenizer, or it has no end-of-document token.

    Attributes:
      needed_vocab_size: least number of ids that a model needs for texts without added tokens, some
        of which may have larger ids.
      special_tokens: the text of each special token.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path)
        file = file / "tokenizer.json" if isdir(file) else file
        if not isfile(file):
            raise _problem(
                f"{path!r} is neither 'byte' nor the path of a tokenizer.json "
                "or of a SentencePiece .model"
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        # The library raises bare Exception for whatever it cannot parse.
        except Exception as error:
            raise _problem(f"{file} is not a Hugging Face tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self.vocabulary
        # Ids may have gaps, so the number of tokens may be smaller than the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special = _special_tokens(file.with_name(TOKENIZER_CONFIG), vocabulary)
        if special["eos_token"] not in vocabulary:
            raise _problem(
                f"{file} has no end-of-document token; "
                "name its eos_token in tokenizer_config.json next to it"
            )
        self.eos_id = vocabulary[special["eos_token"]]
        self.bos_id = vocabulary.get(special["bos_token"])
        self.pad_id = vocabulary.get(special["pad_token"], self.eos_id)
        own_ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        framing = [self.eos_id, self.pad_id, -1 if self.bos_id is None else self.bos_id]
        self.needed_vocab_size = max([*own_ids, *framing]) + 1
        content = json.loads(self._tokenizer.to_str())
        self.token_bytes = _token_bytes(content, vocabulary)
        added = content.get("added_tokens") or ()
        self.special_tokens = [token["content"] for token in added if token["special"]]

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, int32 [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int32 [tokens], and the character range of each, int64 [tokens, 2]."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return token ids with the special tokens that the file's post-processor adds."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def decode_with_special_tokens(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`, including special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def tokens_from(self, first_id: int) -> list[str]:
        """Return the tokens whose ids are at least `first_id`, in their order."""
        tokens = map(self._tokenizer.id_to_token, range(first_id, self.vocab_size))
        return [token for token in tokens if token is not None]


def _token_bytes(tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int]) -> np.ndarray | None:
    """Return the byte count of each token of a byte-level tokenizer, int32 [ids]; None for others.

    Such a tokenizer writes each byte as one character, so a token has as many bytes as characters.
    Special tokens count as 0 bytes; other added tokens are stored as plain text.

    Args:
      tokenizer: content of the tokenizer.json.
      vocabulary: ids by token, added tokens included.
    """
    steps = tokenizer.get("pre_tokenizer") or {}
    levels = [
        step
        for step in steps.get("pretokenizers", [steps])
        if isinstance(step, Mapping) and step.get("type") == "ByteLevel"
    ]
    if not levels or any(step.get("add_prefix_space") for step in levels):
        return None  # a prefix is a byte that the text does not have
    counts = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for token, index in vocabulary.items():
        counts[index] = len(token)
    for added in tokenizer.get("added_tokens") or ():
        counts[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return counts


def _special_tokens(file: Path, vocabulary: Mapping[str, int]) -> dict[str, str]:
    """Return the tokens that begin a document, end it, and pad; "" where there is none."""
    if not file.is_file():
        return {
            "bos_token": _first_of(COMMON_BOS, vocabulary),
            "eos_token": _first_of(COMMON_EOS, vocabulary),
            "pad_token": "",
        }
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _problem(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _problem(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _problem(f"{file} is not a JSON object")
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    if "eos_token" not in config:  # as in GPT-2's
        tokens["eos_token"] = _first_of(COMMON_EOS, vocabulary)
    if config.get("add_bos_token") is False:
        tokens["bos_token"] = None
    # Older files wrap a token in an object.
    names = {
        kind: token.get("content") if isinstance(token, dict) else token
        for kind, token in tokens.items()
    }
    return {kind: name if isinstance(name, str) else "" for kind, name in names.items()}


def _first_of(tokens: Sequence[str], vocabulary: Mapping[str, int]) -> str:
    return next((token for token in tokens if token in vocabulary), "")


def _problem(message: str) -> ConfigError:
    return ConfigError(Problem("data.tokenizer", message))
