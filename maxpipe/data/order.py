"""The order in which documents are visited, as a pure function of (seed, epoch, position)."""

from typing import Protocol

from grain.experimental import index_shuffle


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
