"""Documents: random access to texts or token ids, and their split into training and evaluation."""

from typing import Literal, Protocol

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig

Split = Literal["train", "eval"]


class Documents(Protocol):
    """What a source offers. Picklable, for worker processes; reads a document only when asked for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Document `index`: its text, or its token ids (integers, [tokens]), without begin or end marks."""
        ...


class Subset:
    """The documents at `indices` (int64, [n]) of other documents."""

    def __init__(self, documents: Documents, indices: np.ndarray):
        self._documents = documents
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> str | np.ndarray:
        return self._documents[int(self._indices[index])]


def open_documents(config: DataConfig, split: Split) -> Documents:
    """The documents of one split of `data.source`.

    Raises:
      ConfigError: files are missing or unusable, or the split would be empty.
    """
    documents: Documents = implementation(SOURCES[config.source])(config)
    if not len(documents):
        raise ConfigError(Problem("data.path", f"there is no document in {config.path!r}"))
    return split_documents(documents, split, config.eval_fraction)


def split_documents(documents: Documents, split: Split, eval_fraction: float) -> Documents:
    """The documents of one split; every document is in exactly one.

    A document is kept for evaluation if the hash of its index falls below `eval_fraction`, so that
    documents added at the end move no other document across. With two or more documents neither
    split is empty, unless `eval_fraction` is 0.

    Raises:
      ConfigError: the split would be empty.
    """
    if eval_fraction == 0:
        if split == "train":
            return documents
        raise ConfigError(
            Problem(
                "data.eval_fraction",
                "0 keeps no documents for evaluation; raise it or set eval.every=0",
            )
        )
    if len(documents) < 2:
        raise ConfigError(
            Problem(
                "data.path",
                f"{len(documents)} document cannot serve both training and evaluation; "
                "add documents, or set data.eval_fraction=0 eval.every=0",
            )
        )
    hashes = _hash(np.arange(len(documents)))
    in_eval = hashes < eval_fraction
    in_eval[hashes.argmin()] = True
    in_eval[hashes.argmax()] = False
    return Subset(documents, np.flatnonzero(in_eval if split == "eval" else ~in_eval))


def _hash(indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that look random (SplitMix64's finalizer), float64, [n]."""
    x = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)) / 2.0**53
