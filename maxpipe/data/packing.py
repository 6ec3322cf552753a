"""Row streams, and packing: how streams of documents fill sequences.

A document of tokens d_1..d_L becomes the (input, target) pairs of [bos, d_1..d_L, eos]: inputs are
all but the last, targets all but the first (without bos if the tokenizer has none). A row's stream
is the concatenation of the pairs of its documents, and sequence n of a row holds pairs [n*T,
(n+1)*T) of its stream. Every token of every document is therefore a target exactly once per epoch,
no target crosses from one document into the next, and packed sequences have no padding.

Example, T=4, documents "ab" and "c": the pairs are bos>a a>b b>eos bos>c c>eos, so sequence 0 holds
bos>a a>b b>eos bos>c (segments 1 1 1 2, positions 0 1 2 0) and sequence 1 begins with c>eos.

Shapes: B global batch size, T sequence length.
"""

from typing import TYPE_CHECKING

import numpy as np

from maxpipe.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from maxpipe.data.documents import EncodedDocuments
    from maxpipe.data.mixture import Order

Batch = dict[str, np.ndarray]


class RowStream:
    """The endless stream of one row: documents row, row + B, row + 2B, ... of all epochs.

    Args:
      documents: framed token ids; a document of fewer than two ids has no pair and is skipped.
      order: order in which each epoch visits the documents.
      stride: B.
      state: int64 [3]: epoch, position within the epoch, pairs of that document already used.
    """

    def __init__(
        self, documents: "EncodedDocuments", order: "Order", stride: int, state: np.ndarray
    ):
        self._documents = documents
        self._order = order
        self._stride = stride
        self._epoch, self._position, self._offset = (int(x) for x in state)
        self._ids: np.ndarray | None = None

    @property
    def state(self) -> tuple[int, int, int]:
        """The position of the next pair: epoch, position, offset."""
        return self._epoch, self._position, self._offset

    @property
    def offset(self) -> int:
        """Pairs of the current document already used; 0 at the start of a document."""
        return self._offset

    def take(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int32 [pairs], of one document: at least 1, at most `limit`.

        Raises:
          ConfigError: as many consecutive documents as there are hold no tokens.
        """
        ids = self._current()
        end = min(self._offset + limit, len(ids) - 1)
        inputs = ids[self._offset : end]
        targets = ids[self._offset + 1 : end + 1]
        self._offset = end
        if end == len(ids) - 1:
            self.skip_rest()
        return inputs, targets

    def skip_rest(self) -> None:
        """Move to the start of the next document."""
        epochs, self._position = divmod(self._position + self._stride, self._order.num_documents)
        self._epoch += epochs
        self._offset = 0
        self._ids = None

    def _current(self) -> np.ndarray:
        # Each epoch has an order of its own: the same few empty documents may follow each other.
        attempts = self._order.num_documents + 100
        for _ in range(attempts):
            if self._ids is None:
                self._ids = self._documents[self._order(self._epoch, self._position)]
            if len(self._ids) > self._offset + 1:
                return self._ids
            self.skip_rest()
        message = (
            f"{attempts} documents, one after the other, hold no tokens "
            f"({self._order.num_documents} in all)"
        )
        raise ConfigError(Problem("data.path", message))


def empty_batch(rows: int, sequence_length: int, pad_id: int) -> Batch:
    """Return a batch [rows, T] of padding: segment 0, weight 0."""
    shape = rows, sequence_length
    return {
        "tokens": np.full(shape, pad_id, np.int32),
        "targets": np.full(shape, pad_id, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "weights": np.zeros(shape, np.float32),
    }


def fill_row(batch: Batch, row: int, stream: RowStream, packing: bool) -> None:
    """Fill `row` of an empty batch from `stream`.

    Segments count from 1 within the sequence, positions from 0 within the segment. This also holds
    for a document that continues from the previous sequence, which attention does not reach.

    Args:
      packing: True fills the row; False takes one document and truncates it to the row's length.
    """
    length = batch["tokens"].shape[1]
    start = 0
    segment = 0
    while start < length and (packing or segment == 0):
        inputs, targets = stream.take(length - start)
        end = start + len(inputs)
        segment += 1
        batch["tokens"][row, start:end] = inputs
        batch["targets"][row, start:end] = targets
        batch["positions"][row, start:end] = np.arange(len(inputs))
        batch["segment_ids"][row, start:end] = segment
        batch["weights"][row, start:end] = 1
        start = end
        if not packing and stream.offset:
            stream.skip_rest()
