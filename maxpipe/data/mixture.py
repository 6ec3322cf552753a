"""Mix several sources: open their documents, and order how they are drawn.

An order is a pure function of (seed, epoch, position). A mixture draws documents in rounds of
`ROUND`: every source has its share (`data.mixture`) of a round, and the draws of a round are
shuffled. The document of draw number g therefore follows from g alone, and the state of a row is
the same as without a mixture.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from grain.experimental import index_shuffle

from maxpipe.config.rules.run import LEAST_SHARE
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation, Documents, Split, is_mixed, open_sources
from maxpipe.data.rows import DocumentOrder, Order

ROUND = round(1 / LEAST_SHARE)  # draws


def open_mixture(config: DataConfig, split: Split, seed: int) -> tuple[Documents, Order]:
    """Return the documents of one split and the order in which to visit them.

    They come from `data.mixture`, each source split separately, or from `data.source` if there is
    no mixture, or for `data.eval_path`. Errors are those of `open_sources`.
    """
    sources = open_sources(config, split)
    if not is_mixed(config, split):
        (documents,) = sources
        return documents, DocumentOrder(len(documents), seed, config.shuffle)
    weights = [entry["weight"] for entry in config.mixture]
    order = MixedOrder([len(source) for source in sources], weights, seed, config.shuffle)
    return Concatenation(sources), order


class MixedOrder:
    """The `Order` in which the documents of a `Concatenation` are drawn.

    Every source has epochs of its own, each a `DocumentOrder` of its documents; its weight decides
    how fast they pass. An epoch of the mixture is as many draws as there are documents, and has no
    further meaning. Weights are in any unit; sources are mixed also without `shuffle`.
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
        # 1. The shuffled slot of this draw within its round, and the source that owns the slot.
        number, draw = divmod(epoch * self.num_documents + position, ROUND)
        seed = (self._seed + number) % 2**32
        slot = index_shuffle(draw, max_index=ROUND - 1, seed=seed, rounds=4)
        source = int(np.searchsorted(self._slots, slot, side="right")) - 1
        # 2. The source has made `_shares` draws in each earlier round.
        source_draw = number * self._shares[source] + slot - int(self._slots[source])
        # 3. Its own epoch and position, and the document there.
        order = self._orders[source]
        return self._firsts[source] + order(*divmod(source_draw, order.num_documents))


def shares(weights: Sequence[float]) -> list[int]:
    """Return each source's draws per round: proportional to weight, at least 1, sum `ROUND`."""
    exact = np.asarray(weights, np.float64) / sum(weights) * ROUND
    counts = np.maximum(exact.astype(int), 1)
    while counts.sum() < ROUND:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > ROUND:
        counts[np.argmax(counts)] -= 1
    return counts.tolist()
