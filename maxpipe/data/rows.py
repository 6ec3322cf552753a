"""The rows of a batch as a grain dataset, prefetched by threads or by worker processes."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from maxpipe.data.documents import EncodedDocuments
from maxpipe.data.mixture import Order
from maxpipe.data.packing import Batch, RowStream, empty_batch, fill_row


@dataclass(frozen=True)
class RowSource:
    """Everything but its state that determines the contents of a row.

    Attributes:
      documents: framed token ids.
      order: order in which documents are visited.
      global_batch_size: number of rows of all processes; the stride of every row.
      sequence_length: T.
      packing: whether a sequence holds several documents or one.
      pad_id: token id of padding.
    """

    documents: EncodedDocuments
    order: Order
    global_batch_size: int
    sequence_length: int
    packing: bool
    pad_id: int


class RowStates(TypedDict):
    """State of a `RowIterator`: int64 [rows, 3] (epoch, position, offset)."""

    rows: np.ndarray


class RowDataset(grain.IterDataset):
    """Endless batches of some rows.

    An element is (batch, state after it: int64 [rows, 3], documents skipped for it: JSON of their
    reasons by index).
    """

    def __init__(self, source: RowSource, state: np.ndarray):
        super().__init__()
        self._source = source
        self._state = state

    def __iter__(self) -> grain.DatasetIterator:
        return RowIterator(self._source, self._state)


class RowIterator(grain.DatasetIterator):
    """The iterator of a `RowDataset`."""

    def __init__(self, source: RowSource, state: np.ndarray):
        super().__init__()
        self._source = source
        self.set_state({"rows": state})

    def __next__(self) -> tuple[Batch, np.ndarray, str]:
        source = self._source
        batch = empty_batch(len(self._streams), source.sequence_length, source.pad_id)
        for row, stream in enumerate(self._streams):
            fill_row(batch, row, stream, source.packing)
        skipped = source.documents.take_skipped()
        return batch, self.get_state()["rows"], json.dumps(skipped) if skipped else ""

    def get_state(self) -> RowStates:
        return {"rows": np.array([stream.state for stream in self._streams], np.int64)}

    def set_state(self, state: RowStates) -> None:
        source = self._source
        self._streams = [
            RowStream(source.documents, source.order, source.global_batch_size, row)
            for row in state["rows"]
        ]


def prefetched(
    source: RowSource, states: Sequence[np.ndarray], depth: int, processes: bool
) -> list[grain.DatasetIterator]:
    """Return one started iterator over `RowDataset` elements per entry of `states`.

    Args:
      states: int64 [rows, 3] for each iterator.
      depth: elements that each iterator prefetches.
      processes: whether each iterator has a worker process instead of a thread.
    """
    if processes and not flags.FLAGS.is_parsed():
        # grain's workers read absl flags, which only absl.app parses.
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
    """Let a worker process ignore signals and end with its parent."""
    # After a signal to the process group the parent still needs batches to finish its step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # If the parent is killed, only this thread ends the worker.
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
