"""The order in which documents are visited, as a pure function of (seed, epoch, position).

Documents of several sources in the shares of `data.mixture`, as one sequence with an order of its
own.

Draws come in rounds of `ROUND`, of which every source has its share; within a round they are
shuffled. So which document draw number g is follows from g alone, and the state of a row stays what
it is without a mixture."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import numpy as np
from grain.experimental import index_shuffle

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.rules.run import LEAST_SHARE
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents, Split, open_documents


class Order(Protocol):
    """Which document is visited when; an epoch has `num_documents` positions."""

    num_documents: int

    def __call__(self, epoch: int, position: int) -> int:
        """Index of the document at `position` of `epoch`."""
        ...


class DocumentOrder:
    """A permutation of `num_documents` documents per epoch.

    Args:
      num_documents: below 2**32.
      seed: any non-negative integer.
      shuffle: False visits the documents in their own order in every epoch.
    """

    def __init__(self, num_documents: int, seed: int, shuffle: bool):
        assert 0 < num_documents < 2**32
        self.num_documents = num_documents
        self._seed = seed
        self._shuffle = shuffle

    def __call__(self, epoch: int, position: int) -> int:
        """Index of the document at `position` of `epoch`."""
        if not self._shuffle:
            return position
        seed = (self._seed + epoch) % 2**32
        return index_shuffle(position, max_index=self.num_documents - 1, seed=seed, rounds=4)


ROUND = round(1 / LEAST_SHARE)


def open_mixture(config: DataConfig, split: Split, seed: int) -> tuple[Documents, Order]:
    """The documents of one split of `data.mixture`, or of `data.source` without one, and the order to visit them in.

    Every source is split by itself.

    Raises:
      ConfigError: as `open_documents`; with a mixture the message names the entry.
    """
    if not config.mixture:
        documents = open_documents(config, split)
        return documents, DocumentOrder(len(documents), seed, config.shuffle)
    parts, problems = [], []
    for number, entry in enumerate(config.mixture, 1):
        try:
            one = replace(config, source=entry["source"], path=entry.get("path", ""), mixture=[])
            parts.append(open_documents(one, split))
        except ConfigError as error:
            for problem in error.problems:
                problems.append(
                    Problem("data.mixture", f"entry {number}: {problem.key}: {problem.message}")
                )
    if problems:
        raise ConfigError(*problems)
    weights = [entry["weight"] for entry in config.mixture]
    return Concatenation(parts), MixedOrder(
        [len(part) for part in parts], weights, seed, config.shuffle
    )


class Concatenation:
    """The documents of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Documents]):
        self._parts = parts
        self._firsts = np.array([0, *accumulate(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> str | np.ndarray:
        part = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._parts[part][int(index - self._firsts[part])]


class MixedOrder:
    """The order in which the documents of a `Concatenation` are drawn; as `DocumentOrder`.

    A source goes through its own epochs, in each of them once through all of its documents, as fast
    as its weight makes it. An epoch of the mixture is as many draws as there are documents, and has
    no further meaning.

    Args:
      sizes: documents of each source.
      weights: share of each source, positive, in any unit.
      seed: any non-negative integer.
      shuffle: as in `DocumentOrder`; the sources are mixed either way.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        assert 0 < len(sizes) == len(weights) <= ROUND
        self.num_documents = sum(sizes)
        self._seed = seed
        self._orders = [DocumentOrder(size, seed, shuffle) for size in sizes]
        self._firsts = [0, *accumulate(sizes)]
        self._shares = shares(weights)
        self._slots = np.array([0, *accumulate(self._shares)])

    def __call__(self, epoch: int, position: int) -> int:
        """Index of the document at `position` of `epoch`."""
        number, draw = divmod(epoch * self.num_documents + position, ROUND)
        slot = index_shuffle(
            draw, max_index=ROUND - 1, seed=(self._seed + number) % 2**32, rounds=4
        )
        source = int(np.searchsorted(self._slots, slot, side="right")) - 1
        order = self._orders[source]
        draw_of_source = number * self._shares[source] + slot - int(self._slots[source])
        return self._firsts[source] + order(*divmod(draw_of_source, order.num_documents))


def shares(weights: Sequence[float]) -> list[int]:
    """Draws of each source in a round, in proportion to the weights, but at least one; they add up to `ROUND`."""
    exact = np.asarray(weights, np.float64) / sum(weights) * ROUND
    counts = np.maximum(exact.astype(int), 1)
    while counts.sum() < ROUND:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > ROUND:
        counts[np.argmax(counts)] -= 1
    return counts.tolist()
