"""Provide documents by index, as text or token ids, split into training and evaluation.

A document is a file, a stretch of one, or whatever else a data source returns. In a conversation
only what the assistant writes is a target (`MarkedText`).
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import path_error, reworded
from maxpipe.data.tokenizers import Tokenizer, frame_of

FEW_DOCUMENTS = 10  # with fewer, single documents decide the loss
_BLOCK = 1 << 20  # documents hashed at a time, so that temporaries are small

Split = Literal["train", "eval"]


class BadDocument(ConfigError):
    """A document that will never be readable: it is neither text nor token ids.

    `data.on_bad_document=skip` leaves it out. An I/O error, which may be temporary, is not a
    BadDocument: leaving out what another start can read would change the batches.
    """


def bad_document(message: str) -> BadDocument:
    """Return an error about a document of `data.path`."""
    return BadDocument(Problem("data.path", message))


@dataclass(frozen=True)
class MarkedText:
    """A complete text, begin and end included, of which only some characters are targets."""

    text: str
    spans: tuple[tuple[int, int], ...]  # first character and end of each stretch of targets

    def __len__(self) -> int:
        return len(self.text)


Document = str | MarkedText | np.ndarray


class Documents(Protocol):
    """What a data source returns; picklable, for worker processes, and reads documents lazily."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document:
        """Return text or token ids (integers, [tokens]), both without begin and end of document, or
        marked text.
        """
        ...


class Measured(Protocol):
    """Documents of a source that has `knows_lengths` in the catalogue."""

    def lengths(self) -> np.ndarray:
        """Return the number of token ids in each document, int64 [documents]."""
        ...


class Encoded(NamedTuple):
    """A document as the model reads it."""

    ids: np.ndarray  # int32 [tokens]
    weights: np.ndarray  # loss weight of each token as a target, float32 [tokens]


_EMPTY = Encoded(np.empty(0, np.int32), np.empty(0, np.float32))


def read_text(path: str, start: int = 0, end: int | None = None, name: str = "") -> str:
    """Return bytes `start` to `end` of a file as text whose lines all end with a newline, without a
    mark of byte order; `name` is the file in messages, if `path` is a copy of it. Raises
    BadDocument if the bytes are not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            text = file.read(-1 if end is None else end - start).decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{name or path} is not UTF-8 text: byte {start + error.start}"
        raise bad_document(message) from error
    except OSError as error:
        raise path_error(f"{path} cannot be read: {error.strerror}") from error
    if start == 0:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class FileDocuments:
    """A document per text file; `originals` are those that the user knows, `paths` maybe copies."""

    def __init__(self, paths: Sequence[str], originals: Sequence[str]):
        self._paths = paths
        self._originals = originals

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        return read_text(self._paths[index], name=self._originals[index])


class Blocks(NamedTuple):
    """How documents are stored, if one cannot be read without those around it."""

    sizes: np.ndarray  # documents of each block, one after the other, int64 [blocks]
    mean_bytes: float  # in memory, of the block of a document


class Concatenation:
    """The documents of several parts, such as files or sources, one part after the other."""

    def __init__(self, parts: Sequence[Documents], blocks: Blocks | None = None):
        self.blocks = blocks
        self._parts = parts
        self._firsts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: int) -> Document:
        part = bisect_right(self._firsts, index) - 1
        return self._parts[part][int(index) - self._firsts[part]]

    def lengths(self) -> np.ndarray:
        return np.concatenate([cast(Measured, part).lengths() for part in self._parts])


class Subset:
    """The documents at `indices` (int64 [n]) of others, of which there are `num_whole`."""

    def __init__(self, documents: Documents, indices: np.ndarray):
        self._documents = documents
        self._indices = indices
        self.num_whole = len(documents)
        self.blocks: Blocks | None = getattr(documents, "blocks", None)
        if self.blocks:
            ends = np.searchsorted(indices, np.cumsum(self.blocks.sizes))
            self.blocks = self.blocks._replace(sizes=np.diff(ends, prepend=0))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Document:
        return self._documents[int(self._indices[index])]

    def lengths(self) -> np.ndarray:
        return cast(Measured, self._documents).lengths()[self._indices]


def describe_sources(data: DataConfig) -> str:
    """Return the source, or the sources of a mixture with their shares and how these change."""
    steps = [step for step, *_ in data.mixture_changes]
    later = "".join(f", after step {step} {describe_shares(data, step)}" for step in steps)
    shares = f"{describe_shares(data, 0)}{later} by {data.mixture_by}"
    return shares if data.mixture else data.source


def describe_shares(data: DataConfig, step: float) -> str:
    """Return the sources of a mixture with their shares after `step` steps; "" without one.

    Where a source repeats, the last part of its first path follows.
    """
    weights = data.weights_after(step)
    texts = []
    for weight, entry in zip(weights, data.mixture, strict=True):
        name = entry["source"]
        if data.sources.count(name) > 1:
            name += f":{os.path.basename(entry.get('path', '').partition(',')[0].rstrip('/'))}"
        texts.append(f"{weight / sum(weights):.3g} {name}")
    return " + ".join(texts)


def each_source(config: DataConfig) -> list[DataConfig]:
    """Return the configuration of each source of a mixture alone; `config` if there is none."""
    return [
        replace(config, source=entry["source"], path=entry.get("path", ""), mixture=[])
        for entry in config.mixture
    ] or [config]


def is_mixed(config: DataConfig, split: Split) -> bool:
    """Return whether a split reads `data.mixture`, where each source is split separately."""
    return bool(config.mixture) and not (split == "eval" and config.eval_path)


def open_sources(config: DataConfig, split: Split) -> list[Documents]:
    """Return the documents of one split for each source, a single one unless `is_mixed`; errors are
    those of `open_documents`.
    """
    if not is_mixed(config, split):
        return [open_documents(config, split)]
    sources = []
    for number, source in enumerate(each_source(config), 1):
        try:
            sources.append(open_documents(source, split))
        except ConfigError as error:
            in_entry = [Problem("data.mixture", f"entry {number}: {p}") for p in error.problems]
            raise ConfigError(*in_entry) from error
    return sources


def open_documents(config: DataConfig, split: Split) -> Documents:
    """Return the documents of one split of `data.source`.

    With `data.eval_path`, evaluation has all of its documents and training all of `data.path`'s.
    Raises ConfigError if files are missing or unusable, or the split would be empty.
    """
    if not config.eval_path or split == "train":
        fraction = 0 if config.eval_path else config.eval_fraction
        return split_documents(open_all(config), split, fraction)
    try:
        return open_all(replace(config, path=config.eval_path))
    except ConfigError as error:
        raise reworded(error, lambda p: replace(p, key="data.eval_path")) from error


def open_all(config: DataConfig) -> Documents:
    """Return all documents of `data.source`; raises ConfigError if files are missing or unusable,
    or there is no document.
    """
    documents: Documents = implementation(SOURCES[config.source])(config)
    if not len(documents):
        raise path_error(f"there is no document in {config.path!r}")
    return documents


def split_documents(documents: Documents, split: Split, eval_fraction: float) -> Documents:
    """Return the documents of one split; every document is in exactly one.

    A document belongs to evaluation if the hash of its index is below `eval_fraction`, so documents
    added at the end move no other document to the other split. With two or more documents neither
    split is empty, unless `eval_fraction` is 0; an empty one is a ConfigError.
    """
    if eval_fraction == 0:
        if split == "train":
            return documents
        message = "0 keeps no documents for evaluation; raise it or set eval.every=0"
        raise ConfigError(Problem("data.eval_fraction", message))
    if len(documents) < 2:
        raise path_error(
            "1 document cannot serve both training and evaluation; add documents, give a "
            "validation set with data.eval_path, or set data.eval_fraction=0 eval.every=0"
        )
    hashes = np.empty(len(documents))
    for start in range(0, len(documents), _BLOCK):
        stop = min(start + _BLOCK, len(documents))
        hashes[start:stop] = _hash(np.arange(start, stop))
    in_eval = hashes < eval_fraction
    in_eval[hashes.argmin()] = True
    in_eval[hashes.argmax()] = False
    del hashes
    return Subset(documents, np.flatnonzero(in_eval if split == "eval" else ~in_eval))


def describe_held_out(count: int, total: int) -> str:
    """Return in words how many documents are held out, with the remedy if they are few."""
    few = " (few: raise data.eval_fraction)" if count < FEW_DOCUMENTS else ""
    return f"{count:,} of {total:,} documents{few}"


def _hash(indices: np.ndarray) -> np.ndarray:
    """Return pseudo-random numbers in [0, 1), float64 [n], by SplitMix64's finalizer."""
    x = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) / 2.0**53


class EncodedDocuments:
    """Documents as token ids, framed by the tokenizer's begin and end of document unless they have
    them, or are `MarkedText`.

    Ids below 0 or from `vocab_size` on are refused: JAX would silently clamp them. So are ids that
    the tokenizer does not have: another one made them. With `skips_bad` a `BadDocument` counts as
    an empty document instead of ending the run.
    """

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, vocab_size: int, skips_bad: bool = False
    ):
        self.documents = documents
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._skips_bad = skips_bad
        self._skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.documents)

    def take_skipped(self) -> dict[int, str]:
        """Return the reason by index of each document skipped since the last call."""
        skipped = self._skipped
        self._skipped = {}
        return skipped

    def __getitem__(self, index: int) -> Encoded:
        """Return [begin..., tokens..., eos], all of them targets, or nothing if it has no tokens.

        A `MarkedText` has its own tokens; those that overlap one of its spans are targets. Raises
        BadDocument unless bad documents are skipped, ConfigError for an id outside the vocabulary.
        """
        try:
            return self.encode(self.documents[index])
        except BadDocument as error:
            if not self._skips_bad:
                remedy = "; data.on_bad_document=skip leaves such documents out"
                raise reworded(error, lambda p: replace(p, message=p.message + remedy)) from error
            self._skipped[index] = str(error)
            return _EMPTY

    def encode(self, document: Document) -> Encoded:
        """Encode a document that has been read, as `__getitem__` does."""
        if isinstance(document, MarkedText):
            encoded = encode_marked(document, self._tokenizer)
            self._check_ids(encoded.ids)
            return encoded
        ids = self._tokenizer.encode(document) if isinstance(document, str) else document
        ids = np.asarray(ids)
        if ids.size == 0:
            return _EMPTY
        self._check_ids(ids)
        begin, eos = frame_of(self._tokenizer)
        start = [] if ids[: len(begin)].tolist() == begin else begin
        end = [] if ids[-1] == eos and ids.size + len(start) > 1 else [eos]
        framed = np.concatenate([start, ids, end], dtype=np.int32, casting="unsafe")
        return Encoded(framed, np.ones(len(framed), np.float32))

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.min() < 0:
            raise path_error(f"a document holds the token id {ids.min()}; write ids from 0 on")
        if ids.max() < min(self._vocab_size, self._tokenizer.vocab_size):
            return
        held = f"a document holds token ids {ids.min()} to {ids.max()}"
        if ids.max() < self._tokenizer.vocab_size:
            message = f"{self._vocab_size} is too small for the data: {held}; raise it"
            raise ConfigError(Problem("model.vocab_size", message))
        message = (
            f"has {self._tokenizer.vocab_size} ids, but {held}: name the tokenizer that made them, "
            "data.tokenizer=hf:ORG/NAME or a file; ids:N if they stand for no text"
        )
        raise ConfigError(Problem("data.tokenizer", message))


def require_offsets(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer's `encode_with_offsets`; raises ConfigError if it has none, so that it
    does not know which characters its tokens stand for.
    """
    encode = getattr(tokenizer, "encode_with_offsets", None)
    if encode is None:
        message = "does not tell which characters its tokens stand for; take a tokenizer.json"
        raise ConfigError(Problem("data.tokenizer", message))
    return encode


def encode_marked(document: MarkedText, tokenizer: Tokenizer) -> Encoded:
    """Return the tokens of a text; those that overlap one of its spans have weight 1."""
    ids, offsets = require_offsets(tokenizer)(document.text)
    first, end = offsets.T
    weights = np.zeros(len(ids), np.float32)
    for span_first, span_end in document.spans:
        weights[(first < span_end) & (end > span_first)] = 1
    return Encoded(ids, weights)
