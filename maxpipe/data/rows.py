"""The rows of a batch as a grain dataset, prefetched by a thread or by worker processes."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from maxpipe.data.encoding import EncodedDocuments
from maxpipe.data.mixture import Order
from maxpipe.data.packing import Batch, RowStream, empty_batch, fill_row


@dataclass(frozen=True)
class RowSource:
    """All that decides which pairs a row gets, apart from its state.

    Attributes:
      documents: framed token ids.
      order: visiting order.
      global_batch_size: rows over all processes, the stride of every row.
      sequence_length: T.
      packing: several documents per sequence, or one.
      pad_id: token id of padding.
    """

    documents: EncodedDocuments
    order: Order
    global_batch_size: int
    sequence_length: int
    packing: bool
    pad_id: int


class RowDataset(grain.IterDataset):
    """Endless batches of some rows; an element is (batch, state after it, int64 [rows, 3])."""

    def __init__(self, source: RowSource, state: np.ndarray):
        super().__init__()
        self._source = source
        self._state = state

    def __iter__(self) -> grain.DatasetIterator:
        return RowIterator(self._source, self._state)


class RowIterator(grain.DatasetIterator):
    def __init__(self, source: RowSource, state: np.ndarray):
        super().__init__()
        self._source = source
        self.set_state({"rows": state})

    def __next__(self) -> tuple[Batch, np.ndarray]:
        source = self._source
        batch = empty_batch(len(self._streams), source.sequence_length, source.pad_id)
        for row, stream in enumerate(self._streams):
            fill_row(batch, row, stream, source.packing)
        return batch, self.get_state()["rows"]

    def get_state(self) -> dict[str, Any]:
        return {"rows": np.array([stream.state for stream in self._streams], np.int64)}

    def set_state(self, state: dict[str, Any]) -> None:
        source = self._source
        self._streams = [
            RowStream(source.documents, source.order, source.global_batch_size, row)
            for row in state["rows"]
        ]


def prefetched(
    source: RowSource, states: Sequence[np.ndarray], depth: int, processes: bool
) -> list[grain.DatasetIterator]:
    """One started iterator over `RowDataset` elements per entry of `states`.

    Args:
      states: int64 [rows, 3] per iterator.
      depth: elements that each iterator prepares ahead.
      processes: one worker process per iterator instead of one thread.
    """
    if processes and not flags.FLAGS.is_parsed():
        # grain's workers read absl flags, which nobody parses outside absl.app.
        flags.FLAGS.mark_as_parsed()
    iterators = []
    for state in states:
        dataset: grain.IterDataset = RowDataset(source, state)
        if processes:
            options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=depth)
            dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
        else:
            dataset = ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=depth)
        iterators.append(iter(dataset))
    for iterator in iterators:
        iterator.start_prefetch()
    return iterators


def _start_worker(index: int, count: int) -> None:
    """Makes a worker process live exactly as long as its parent needs it."""
    # A signal to the whole process group must leave the parent able to finish its step and save.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Nothing else ends a worker whose parent was killed.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
