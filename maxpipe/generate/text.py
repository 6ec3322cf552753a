"""Say how to continue a text: options, the tokenizer of a run, prompts, text token by token."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from maxpipe.checkpoint.steps import StepStore
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.catalog import TOKENIZERS
from maxpipe.config.sections import MOST_SEED
from maxpipe.data.files import reworded
from maxpipe.data.fingerprint import tokenizer_digest
from maxpipe.data.tokenizers import (
    TOKENIZER,
    Tokenizer,
    decode_all,
    encode_prompt,
    load_tokenizer,
    main_file,
    needed_ids,
)
from maxpipe.hf.origin import ORIGIN, end_ids, origin_of


@dataclass(frozen=True)
class Options:
    """How a text is continued: the arguments of `Model.generate`.

    Raises:
      ValueError: one is out of range.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        legal = {
            "max_tokens": (self.max_tokens >= 1, "a number at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "a number at least 0, and finite"),
            "top_k": (self.top_k >= 0, "a number at least 0; 0 = all tokens"),
            "top_p": (0 < self.top_p <= 1, "a number above 0, and at most 1; 1 = all tokens"),
            "seed": (0 <= self.seed <= MOST_SEED, f"a number from 0 to {MOST_SEED}"),
            "stop": (all(self.stop_texts), "texts, none of them empty"),
        }
        for name, (is_legal, text) in legal.items():
            if not is_legal:
                raise ValueError(f"{name}: expected {text}; got {getattr(self, name)!r}")

    @property
    def stop_texts(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def find_tokenizer(
    flag: str | None, config: Config, meta: Mapping[str, Any], store: StepStore
) -> Tokenizer:
    """Return the tokenizer that --tokenizer names, or, if it is None, that of the run with this
    checkpoint; raises ConfigError if it is gone, or has ids that the model does not know.
    """
    try:
        found = (flag, load_tokenizer(flag)) if flag else _tokenizer_of_run(config, meta, store)
    except ConfigError as error:
        if flag:
            raise reworded(error, lambda p: replace(p, key="--tokenizer")) from error
        moved = Problem("--tokenizer", "names the tokenizer of the run if it has moved")
        raise ConfigError(*error.problems, moved) from error
    name, tokenizer = found
    needed, there = needed_ids(tokenizer, config.model), config.model.num_token_ids
    if needed > there:
        message = f"{name} needs {needed} ids, the model has {there}: it was trained with another"
        raise ConfigError(Problem("--tokenizer", message))
    return tokenizer


def _tokenizer_of_run(
    config: Config, meta: Mapping[str, Any], store: StepStore
) -> tuple[str, Tokenizer]:
    """Return path and tokenizer: the run's copy, or the original if only that fits the step."""
    original = config.data.tokenizer
    fingerprint = meta.get("fingerprint")
    expected = fingerprint.get("tokenizer") if isinstance(fingerprint, Mapping) else None
    with store.local_files(TOKENIZER) as files:
        copy = main_file(files)
        paths = [original] if copy is None or original in TOKENIZERS else [str(copy), original]
        for path in paths:
            with suppress(ConfigError):
                if expected is not None and tokenizer_digest(path) == expected:
                    return path, load_tokenizer(path)
        if expected is not None:
            warning = f"{paths[0]} is not the tokenizer that the run was trained with, or is gone"
            print(f"warning: {warning}", file=sys.stderr)
        return paths[0], load_tokenizer(paths[0])


def imported_ends(config: Config, store: StepStore) -> set[int]:
    """Return the ids that end a text in the model that a run was imported from; none if the run was
    trained with another tokenizer or was not imported. Chat models have several.
    """
    with store.local_files(ORIGIN) as kept, store.local_files(TOKENIZER) as companions:
        return end_ids(origin_of(config, kept), companions)


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError for ids of --stop-token that the model cannot draw."""
    if outside := [str(token) for token in ids if not 0 <= token < vocab_size]:
        message = f"the model has no token {', '.join(outside)}; its ids are 0 to {vocab_size - 1}"
        raise ConfigError(Problem("--stop-token", message))


def check_known(ids: Sequence[int], tokenizer: Tokenizer, num_ids: int, key: str) -> None:
    """Raise ConfigError, naming `key`, if the ids of a text are not among a model's `num_ids`."""
    if unknown := [token for token in ids if token >= num_ids]:
        message = f"the model has no token {decode_all(tokenizer, unknown[:1])}; leave it out"
        raise ConfigError(Problem(key, message))


def read_prompt(
    prompt: str, tokenizer: Tokenizer, config: Config, key: str = "--prompt"
) -> list[int]:
    """Return the token ids of a prompt, framed as the tokenizer does; raises ConfigError, naming
    `key`, if it is empty, too long, or has tokens that the model does not have.
    """
    if not len(tokenizer.encode(prompt)):
        raise ConfigError(Problem(key, "is empty; give the text to continue"))
    ids = encode_prompt(tokenizer, prompt)
    check_known(ids, tokenizer, config.model.num_token_ids, key)
    limit = config.data.sequence_length
    if len(ids) > limit:
        message = (
            f"has {len(ids)} tokens, and the model has learned {limit} positions "
            "(data.sequence_length); shorten it"
        )
        raise ConfigError(Problem(key, message))
    return ids


class TextStream:
    """Decodes a growing sequence of tokens; a character may take several of them.

    The text of `ids`, the tokens before the first new one, is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]):
        self._tokenizer = tokenizer
        # The tokens of the last text are decoded together with the next ones: some tokenizers drop
        # the space that a text begins with, and some give up a run of bytes if any of it is torn.
        self._ids = list(ids)
        self._num_shown = len(self._ids)
        self._shown = tokenizer.decode(self._ids)

    def add(self, token: int) -> str:
        """Return the text that `token` completes; "" in the middle of a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        completed = text[len(self._shown) :]
        newest = self._ids[self._num_shown :]
        # Tokens without text, such as special ones, are no context: the earlier ones stay.
        if alone := self._tokenizer.decode(newest):
            self._ids, text = newest, alone
        self._num_shown = len(self._ids)
        self._shown = text
        return completed

    def finish(self) -> str:
        """Return the text of a last character that was never completed."""
        return self._tokenizer.decode(self._ids)[len(self._shown) :]
