"""Read a Hugging Face tokenizer.json, and the files next to it that name its special tokens."""

import json
from collections.abc import Mapping, Sequence
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import TOKENIZER

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CONVERT = (
    "convert other formats, such as tekken, tiktoken or vocab.json, with AutoTokenizer"
    ".from_pretrained(FOLDER).save_pretrained(NEW) of transformers, which writes a tokenizer.json"
)
# Tried in this order if no tokenizer_config.json names the tokens.
COMMON_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<｜begin▁of▁sentence｜>")
COMMON_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>")


class Frame(NamedTuple):
    """What surrounds a document: the ids before it, and the one after it."""

    begin: list[int]
    end: int


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
      frame, earlier_frame: see `frame_of` and `earlier_frame_of`.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path)
        file = file / TOKENIZER if isdir(file) else file
        if not isfile(file):
            raise _problem(
                f"{path!r} is neither 'byte' nor the path of a tokenizer.json "
                f"or of a SentencePiece .model; {CONVERT}"
            )
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        # The library raises bare Exception for whatever it cannot parse.
        except Exception as error:
            message = f"{file} is not a Hugging Face tokenizer.json: {error}; {CONVERT}"
            raise _problem(message) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self.vocabulary
        # Ids may have gaps, so the number of tokens may be smaller than the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        config = read_object(file.with_name(TOKENIZER_CONFIG))
        names = read_object(file.with_name(SPECIAL_TOKENS_MAP))
        special = _special_tokens(named_tokens(config, names), vocabulary)
        earlier = _special_tokens(config, vocabulary)
        if special["eos_token"] not in vocabulary:
            raise _problem(
                f"{file} has no end-of-document token; "
                "name its eos_token in tokenizer_config.json next to it"
            )
        self.eos_id = vocabulary[special["eos_token"]]
        self.bos_id = vocabulary.get(special["bos_token"])
        self.pad_id = vocabulary.get(special["pad_token"], self.eos_id)
        own_ids = self._tokenizer.get_vocab(with_added_tokens=False).values()
        is_neox = str((config or {}).get("tokenizer_class")).startswith("GPTNeoXTokenizer")
        begin = [] if is_neox else self._ids_before_a_text()
        self.frame = Frame(begin, self.eos_id)
        bos_id = vocabulary.get(earlier["bos_token"])
        eos_id = vocabulary.get(earlier["eos_token"], self.eos_id)
        self.earlier_frame = Frame([] if bos_id is None else [bos_id], eos_id)
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

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def decode_with_special_tokens(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _token_bytes(tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int]) -> np.ndarray | None:
    """Return the byte count of each token of a byte-level tokenizer, int32 [ids]; None for others.

    Such a tokenizer writes each byte as one character, so a token has as many bytes as characters.
    Special tokens count as 0 bytes; other added tokens are stored as plain text.
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
    except OSError as error:
        raise _problem(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _problem(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _problem(f"{file} is not a JSON object")
    return content


def _special_tokens(
    config: Mapping[str, object] | None, vocabulary: Mapping[str, int]
) -> dict[str, str]:
    """Return the tokens that begin a document, end it, and pad; "" where there is none."""
    if config is None:
        return {
            "bos_token": _first_of(COMMON_BOS, vocabulary),
            "eos_token": _first_of(COMMON_EOS, vocabulary),
            "pad_token": "",
        }
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
