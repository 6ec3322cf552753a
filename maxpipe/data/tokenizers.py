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
from maxpipe.config.model_places import TOKENIZER as TOKENIZER_FILE
from maxpipe.config.model_places import num_plain_ids, open_folder, tokenizer_folder, tokenizer_path
from maxpipe.config.sections import ModelConfig

TOKENIZER = "tokenizer"  # directory of a run with copies of its tokenizer's files
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
_BESIDE = (TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS_MAP)  # files next to a tokenizer's own
_CONVERT = (
    "convert other formats, such as tekken, tiktoken or vocab.json, with AutoTokenizer"
    ".from_pretrained(FOLDER).save_pretrained(NEW) of transformers, which writes a tokenizer.json"
)
# Tried in this order if no file names the tokens.
_COMMON_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>")
_COMMON_EOS = (
    "</s>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<eos>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer; picklable, for worker processes.

    Conversations also need `encode_with_offsets`, as `ByteTokenizer` has it.
    """

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


class Frame(NamedTuple):
    """What surrounds a document: the ids before it, and the one after it."""

    begin: list[int]
    end: int


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
    """Return the files that make up a tokenizer, which may be copied under the same names; empty
    for one that has none. Arguments and errors are those of `load_tokenizer`.
    """
    if name_or_path in TOKENIZERS or num_plain_ids(name_or_path):
        return []
    file = Path(_local_path(name_or_path, cache_dir))
    if file.suffix == ".model":
        return [file]
    file = file / TOKENIZER_FILE if isdir(file) else file
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


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that a model is to continue: those of a document that begins
    with it.
    """
    ids: list[int] = tokenizer.encode(text).tolist()
    begin = frame_of(tokenizer).begin
    return ids if ids[: len(begin)] == begin else begin + ids


def without_special_tokens(tokenizer: Tokenizer, text: str) -> str:
    """Return a text without the special tokens that a user has written in it."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for token in tokenizer.special_tokens:
            text = text.replace(token, "")
    return text


def decode_all(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """Return the text of `ids`, including special tokens, as a chat template may write."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.decode(ids, skip_special_tokens=False)
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
        """Return token ids, int32 [tokens], and first character and end of each,
        int64 [tokens, 2].
        """
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
        """Raises ConfigError for words that are not ids."""
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
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise _problem(f"{path} is no SentencePiece model: {error}; {_CONVERT}") from error
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


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` library without running code.

    The file's post-processor says what precedes a text, as in transformers 5, where `add_bos_token`
    has no effect. The file does not say which of its tokens ends a document.
    `tokenizer_config.json` and `special_tokens_map.json` next to it do (`bos_token`, `eos_token`,
    `pad_token`); without them, common names are tried, and likewise for an `eos_token` that they
    leave out.

    Truncation and padding that the script that saved the file may have left in it are ignored: a
    text has all of its tokens and no others. Raises ConfigError if the file, or that of the
    directory, is not a tokenizer, or has no end-of-document token.

    Attributes:
      needed_vocab_size: least number of ids that a model needs for texts without added tokens.
      special_tokens: the text of each special token.
      frame: see `frame_of`.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path)
        file = file / TOKENIZER_FILE if isdir(file) else file
        if not isfile(file):
            raise _problem(
                f"{path!r} is neither 'byte' nor the path of a tokenizer.json "
                f"or of a SentencePiece .model; {_CONVERT}"
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        # The library raises bare Exception for whatever it cannot parse.
        except Exception as error:
            message = f"{file} is not a Hugging Face tokenizer.json: {error}; {_CONVERT}"
            raise _problem(message) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self.vocabulary
        # Ids may have gaps, so the number of tokens may be smaller than the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        config = read_object(file.with_name(TOKENIZER_CONFIG))
        names = read_object(file.with_name(SPECIAL_TOKENS_MAP))
        bos, eos, pad = _special_tokens(named_tokens(config, names), vocabulary)
        if eos not in vocabulary:
            raise _problem(
                f"{file} has no end-of-document token; "
                "name its eos_token in tokenizer_config.json next to it"
            )
        self.eos_id = vocabulary[eos]
        self.bos_id = vocabulary.get(bos)
        self.pad_id = vocabulary.get(pad, self.eos_id)
        is_neox = str((config or {}).get("tokenizer_class")).startswith("GPTNeoXTokenizer")
        begin = [] if is_neox else self._ids_before_a_text()
        self.frame = Frame(begin, self.eos_id)
        own_ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        framing = [self.eos_id, self.pad_id, -1 if self.bos_id is None else self.bos_id, *begin]
        self.needed_vocab_size = max([*own_ids, *framing]) + 1
        content = json.loads(self._tokenizer.to_str())
        self.token_bytes = _token_bytes(content, vocabulary)
        added = content.get("added_tokens") or ()
        self.special_tokens = [token["content"] for token in added if token["special"]]

    @property
    def vocabulary(self) -> Mapping[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def _ids_before_a_text(self) -> list[int]:
        """Return the ids that the file's post-processor puts before a text."""
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers.models import WordLevel

        text = FastTokenizer(WordLevel({"a": 0}, unk_token="a")).encode("a")
        encoding = self._tokenizer.post_process(text)
        return encoding.ids[: encoding.special_tokens_mask.index(0)]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens)


def _token_bytes(tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int]) -> np.ndarray | None:
    """Return the byte count of each token of a byte-level tokenizer, int32 [ids]; None for others.

    Such a tokenizer writes each byte as one character, so a token has as many bytes as characters.
    Special tokens count as 0 bytes; other added tokens are stored as plain text.
    """
    steps = tokenizer.get("pre_tokenizer") or {}
    levels = [
        step for step in steps.get("pretokenizers", [steps]) if step.get("type") == "ByteLevel"
    ]
    if not levels or any(step.get("add_prefix_space") for step in levels):
        return None  # a prefix is a byte that the text does not have
    counts = np.zeros(max(vocabulary.values()) + 1, np.int32)
    for token, index in vocabulary.items():
        counts[index] = len(token)
    for added in tokenizer.get("added_tokens") or ():
        counts[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return counts


def named_tokens(
    config: Mapping[str, object] | None, names: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """Return what names a tokenizer's special tokens, as in transformers: tokenizer_config.json,
    and special_tokens_map.json next to files of older versions.
    """
    if names is None or "added_tokens_decoder" in (config or {}):
        return config
    return {**(config or {}), **names}


def read_object(file: Path | None) -> Mapping[str, object] | None:
    """Return the JSON object in a file, None if there is no file; raises ConfigError if it is
    something else.
    """
    if file is None or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _problem(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise _problem(f"{file} is not a JSON object")
    return content


def _special_tokens(
    config: Mapping[str, object] | None, vocabulary: Mapping[str, int]
) -> list[str]:
    """Return the tokens that begin a document, end it, and pad; "" where there is none."""
    if config is None:
        config = {"bos_token": _first_of(_COMMON_BOS, vocabulary)}
    tokens = {"eos_token": _first_of(_COMMON_EOS, vocabulary), **config}  # GPT-2's names none
    if config.get("add_bos_token") is False:
        tokens["bos_token"] = None
    found = [tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")]
    # Older files wrap a token in an object.
    names = [token.get("content") if isinstance(token, dict) else token for token in found]
    return [name if isinstance(name, str) else "" for name in names]


def _first_of(tokens: Sequence[str], vocabulary: Mapping[str, int]) -> str:
    return next((token for token in tokens if token in vocabulary), "")


def _problem(message: str) -> ConfigError:
    return ConfigError(Problem("data.tokenizer", message))
