"""Order documents that are stored in blocks, such as the row groups of parquet files, so that few
blocks are read at a time, and each about once in an epoch.

The blocks of an epoch are shuffled, then the documents of every few consecutive ones: a window.
Rows of a batch get ahead of each other, by more and more documents, because these differ in
length. Therefore the epoch is cut into as many stretches as the batch has rows, and each row reads
a stretch of its own. If blocks are so large that not all rows can have one open, several rows share
a stretch, and take its documents in turn.

Shapes: B rows of the global batch.
"""

from functools import lru_cache

import numpy as np
from grain.experimental import index_shuffle

from maxpipe.data.documents import Blocks

# These decide the order, so runs that continue need the same.
OPEN = 3 << 29  # most bytes of the windows of all rows; some rows are in the next one: twice that
LEAST_OPEN = 64  # blocks that they read at a time if these are no larger
_FEW = 1 << 12  # documents of a window whose permutation is kept


class BlockOrder:
    """An `Order` of documents in blocks for `rows` rows, B, another one in every epoch.

    Row r reads positions r, r + B, ... of all epochs. Any other reader may follow the order, too,
    but reads blocks more often. Windows take at most `share` of `OPEN`.
    """

    first_draw = 0

    def __init__(self, blocks: Blocks, seed: int, rows: int, share: float = 1):
        self.num_documents = int(blocks.sizes.sum())
        self._sizes = blocks.sizes
        self._firsts = np.cumsum(blocks.sizes) - blocks.sizes
        self._seed, self._rows = seed, rows
        may_be_open = max(1, int(OPEN * share / max(blocks.mean_bytes, 1)))
        self._sharing = -(-rows // min(rows, may_be_open))  # rows of a stretch
        stretches = -(-rows // self._sharing)
        self._window = max(1, min(LEAST_OPEN, may_be_open) // stretches)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, epoch: int, position: int) -> int:
        # 1. The place in the shuffled epoch. A row keeps its lane during an epoch.
        turn, lane = divmod(position, self._rows)
        rank = lane % self._sharing
        first = lane - rank  # the first lane of its stretch
        sharing = min(self._sharing, self._rows - first)
        turns, longer = divmod(self.num_documents, self._rows)  # the first `longer` have one more
        place = first * turns + min(first, longer) + turn * sharing + rank
        # 2. The document at that place of its window.
        blocks, ends = self._epoch(epoch)
        window = int(np.searchsorted(ends[self._window - 1 :: self._window], place, side="right"))
        first_block = window * self._window
        start = int(ends[first_block - 1]) if window else 0
        end = int(ends[min(first_block + self._window, len(ends)) - 1])
        seed = (self._seed + epoch + window) % 2**32
        count, index = end - start, place - start
        if count <= _FEW:  # where grain's shuffle takes up to milliseconds
            document = start + int(_permutation(count, seed)[index])
        else:
            document = start + index_shuffle(index, max_index=count - 1, seed=seed, rounds=4)
        # 3. Its block.
        number = int(np.searchsorted(ends, document, side="right"))
        block = blocks[number]
        return int(self._firsts[block] + document - (ends[number] - self._sizes[block]))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of an epoch in its order, and the places after each, int64 [blocks]."""
        found = self._epochs.get(epoch)
        if found is None:
            blocks = _permutation(len(self._sizes), (self._seed + epoch) % 2**32)
            found = self._epochs[epoch] = blocks, np.cumsum(self._sizes[blocks])
            for old in [*self._epochs][:-2]:  # threads may do so at the same time
                self._epochs.pop(old, None)
        return found


@lru_cache(maxsize=1024)
def _permutation(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)
