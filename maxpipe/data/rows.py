"""Make the rows of a batch: order documents, pack them into sequences, prefetch.

A document of tokens d_1..d_L becomes the (input, target) pairs of [bos, d_1..d_L, eos]: inputs are
all but the last, targets all but the first (without bos if the tokenizer has none). A row's stream
is the concatenation of the pairs of its documents, and sequence n of a row holds pairs [n*T,
(n+1)*T) of its stream. Every token of every document is therefore a target exactly once per epoch,
no target crosses from one document into the next, and packed sequences have no padding. A pair's
weight is its target's: 1, or 0 for what anyone but the assistant says in a conversation.

Example, T=4, documents "ab" and "c": the pairs are bos>a a>b b>eos bos>c c>eos, so sequence 0 holds
bos>a a>b b>eos bos>c (segments 1 1 1 2, positions 0 1 2 0) and sequence 1 begins with c>eos.

A mixture draws documents in rounds of `ROUND`: every source has its share (`data.mixture`) of a
round, and the draws of a round are shuffled. The document of draw number g therefore follows from g
alone, and the state of a row is the same as without a mixture. Shares of the tokens become shares
of the documents by the mean number of targets that a source's documents have. Where weights change
(`data.mixture_changes`), an `Era` begins: each row finishes its document and goes on at the first
draw of the era. A source first gives the documents of the draws that were left out.

grain reads rows ahead, in threads or in worker processes.

Shapes: B global batch size, T sequence length.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, cast

import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.rules.run import LEAST_SHARE
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import (
    Concatenation,
    Documents,
    Encoded,
    EncodedDocuments,
    Measured,
    Split,
    is_mixed,
    open_sources,
)
from maxpipe.data.files import path_error
from maxpipe.data.shuffle import shuffled
from maxpipe.data.tokenizers import load_tokenizer

Batch = dict[str, np.ndarray]
ROUND = round(1 / LEAST_SHARE)  # draws of a mixture
CYCLE = 1 << 12  # rounds; in each cycle of them a source has the same number of draws
_STEP = 2531  # from one offset to the next: odd, and near the golden section of `CYCLE`


class Order(Protocol):
    """An order of documents; an epoch has `num_documents` positions."""

    num_documents: int
    first_draw: int  # rows at an earlier one finish their document, and go on from this one

    def __call__(self, epoch: int, position: int) -> int:
        """Return the index of the document at `position` of `epoch`."""
        ...


class DocumentOrder:
    """A permutation of fewer than 2**32 documents, another in every epoch; without `shuffle` they
    are visited in order.
    """

    first_draw = 0

    def __init__(self, num_documents: int, seed: int, shuffle: bool):
        assert 0 < num_documents < 2**32
        self.num_documents = num_documents
        self._seed = seed
        self._shuffle = shuffle

    def __call__(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        return shuffled(position, self.num_documents, (self._seed + epoch) % 2**32)


class Era(NamedTuple):
    """A change of a mixture, as a checkpoint records it: the weights from then on, and for each row
    of the batch, in order, the first draw that it had not begun.
    """

    weights: Sequence[float]
    unread: Sequence[int]

    @property
    def first_draw(self) -> int:
        return -(-max(self.unread) // ROUND) * ROUND


class _Draws:
    """How the sources of a mixture draw from `first_draw` on; arguments as for `MixedOrder`.

    The documents of a source have numbers in the order in which it gives them: those of `left`
    first, then all from `following` on.
    """

    def __init__(
        self,
        draws: Sequence[float],
        first_draw: int,
        left: Sequence[list[int]],
        following: Sequence[int],
    ):
        self.first_draw = first_draw
        self.left = left
        self._following = following
        # Laid end to end, `draws` divide [0, ROUND]. A round's slots lie there one apart, from an
        # offset below 1, and belong to the source in whose part they lie.
        edges = np.minimum([0.0, *accumulate(draws)], ROUND)
        edges[-1] = ROUND
        offsets = np.arange(CYCLE) * _STEP % CYCLE / CYCLE
        # The first slot of each source and the end of the last, int32 [CYCLE, sources + 1].
        self._slots = np.ceil(edges - offsets[:, None]).astype(np.int32)
        drawn = np.cumsum(np.diff(self._slots), axis=0, dtype=np.int32)
        self._drawn = np.pad(drawn, ((1, 0), (0, 0)))  # before each round, [CYCLE + 1, sources]

    def owner(self, round_: int, slot: int) -> tuple[int, int]:
        """Return the source of a slot in a round, counted from the first, and the number of its
        document.
        """
        slots = self._slots[round_ % CYCLE]
        source = int(np.searchsorted(slots, slot, side="right")) - 1
        count = self.drawn(source, round_) + slot - int(slots[source])
        return source, self.number(source, count)

    def drawn(self, source: int, rounds: int) -> int:
        """Return how many draws a source has made in so many rounds."""
        cycles, rest = divmod(rounds, CYCLE)
        return cycles * int(self._drawn[-1, source]) + int(self._drawn[rest, source])

    def number(self, source: int, count: int) -> int:
        """Return the number of the document that a source gives after `count` others."""
        left = self.left[source]
        return left[count] if count < len(left) else self._following[source] + count - len(left)


class MixedOrder:
    """The `Order` in which the documents of a `Concatenation` are drawn.

    Every source has epochs of its own, each in the order of its documents; its weight decides how
    fast they pass. An epoch of the mixture is as many draws as there are documents, and has no
    further meaning. Sources are mixed also if their orders do not shuffle.

    `draws` are those of each source per round. They sum to `ROUND`, and need not be whole: rounds
    differ by a draw, so that their sum keeps to the share at any time (systematic sampling). The
    weights of `eras` are such draws.
    """

    def __init__(
        self, orders: Sequence[Order], draws: Sequence[float], seed: int, eras: Sequence[Era] = ()
    ):
        sizes = [order.num_documents for order in orders]
        self.num_documents = sum(sizes)
        self._seed = seed
        self._orders = orders
        self._firsts = [0, *accumulate(sizes)]
        self._eras = [_Draws(draws, 0, [[] for _ in sizes], [0 for _ in sizes])]
        for era in eras:
            self._eras.append(self._change(era))
        self.first_draw = self._eras[-1].first_draw

    def __call__(self, epoch: int, position: int) -> int:
        source, number = self._drawn(epoch * self.num_documents + position)
        # The source's own epoch and position, and the document there.
        order = self._orders[source]
        return self._firsts[source] + order(*divmod(number, order.num_documents))

    def _drawn(self, draw: int) -> tuple[int, int]:
        """Return the source of a draw, and the number of its document."""
        number, place = divmod(draw, ROUND)
        slot = shuffled(place, ROUND, (self._seed + number) % 2**32)
        era = next(era for era in reversed(self._eras) if era.first_draw <= draw)
        return era.owner(number - era.first_draw // ROUND, slot)

    def _change(self, change: Era) -> _Draws:
        """Return how documents are drawn after a change: none is left out, or drawn again."""
        era, stride = self._eras[-1], len(change.unread)
        left: list[list[int]] = [[] for _ in self._orders]
        skipped = (range(first, change.first_draw, stride) for first in change.unread)
        for draw in sorted(chain.from_iterable(skipped)):
            source, number = self._drawn(draw)
            left[source].append(number)
        rounds, following = (change.first_draw - era.first_draw) // ROUND, []
        for source, own in enumerate(left):
            count = era.drawn(source, rounds)
            own += era.left[source][count:]
            following.append(era.number(source, max(count, len(era.left[source]))))
        return _Draws(change.weights, change.first_draw, left, following)


def shares(weights: Sequence[float]) -> list[int]:
    """Return each source's draws per round: proportional to weight, 1 or more if that is not 0, sum
    `ROUND`.
    """
    exact = np.asarray(weights, np.float64) / sum(weights) * ROUND
    counts = np.maximum(exact.astype(int), exact > 0)
    while counts.sum() < ROUND:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > ROUND:
        counts[np.argmax(counts)] -= 1
    return counts.tolist()


def order_of(documents: Documents, seed: int, shuffle: bool, rows: int, share: float = 1) -> Order:
    """Return the order of documents for a batch of `rows` rows; `share` is `BlockOrder`'s."""
    if shuffle and (blocks := getattr(documents, "blocks", None)):
        from maxpipe.data.block_order import BlockOrder

        return BlockOrder(blocks, seed, rows, share)
    return DocumentOrder(len(documents), seed, shuffle)


def open_mixture(
    config: DataConfig, split: Split, seed: int, rows: int, eras: Sequence[Era] = ()
) -> tuple[Documents, Order]:
    """Return the documents of one split, those of all sources of a mixture, and the order in which
    `rows` rows visit them; errors are those of `open_sources`.
    """
    sources = open_sources(config, split)
    if not is_mixed(config, split):
        (documents,) = sources
        return documents, order_of(documents, seed, config.shuffle, rows)
    share = 1 / len(sources) / 2  # a draw may be any row's, and some rows get ahead of others
    orders = [order_of(source, seed, config.shuffle, 1, share) for source in sources]
    weights = [entry["weight"] for entry in config.mixture]
    draws, *later = draws_of(config, sources, [weights, *(era.weights for era in eras)])
    eras = [Era(own, era.unread) for own, era in zip(later, eras, strict=True)]
    return Concatenation(sources), MixedOrder(orders, draws, seed, eras)


def draws_of(
    config: DataConfig, sources: Sequence[Documents], changes: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """Return each source's draws per round for weights and for each change of them; raises
    ConfigError if a source with a weight may have none, or has no tokens.
    """
    if config.mixture_by == "documents":
        return [shares(weights) for weights in changes]
    means = [mean_targets(config, source) for source in sources]
    if 0 in means:
        raise ConfigError(Problem("data.mixture", f"entry {means.index(0) + 1} has no tokens"))
    exact = np.array(changes) / means
    draws = exact / exact.sum(axis=1, keepdims=True) * ROUND
    some = np.where(draws > 0, draws, np.inf).min(axis=0)
    if some.min() * CYCLE < 1:
        message = f"entry {some.argmin() + 1} is less than 1 of {ROUND * CYCLE:,} documents"
        raise ConfigError(Problem("data.mixture", f"{message}: raise its weight"))
    return [*draws]


def mean_targets(config: DataConfig, documents: Documents) -> float:
    """Return how many targets a document has in rows on average, for a source that knows lengths.

    The begin and end of a document are among the tokens of all documents, or of none.
    """
    lengths = cast(Measured, documents).lengths()
    known = int((lengths > 0).argmax())
    tokenizer = load_tokenizer(config.tokenizer, config.cache_dir)
    framed = EncodedDocuments(documents, tokenizer, vocab_size=1 << 31)[known].ids
    targets = np.where(lengths > 0, lengths - lengths[known] + len(framed) - 1, 0)
    return float(np.minimum(targets, np.inf if config.packing else config.sequence_length).mean())


class Pairs(NamedTuple):
    """Consecutive pairs of a document, each [pairs]: int32, int32 and float32."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class RowStream:
    """The endless stream of one row: documents row, row + B, row + 2B, ... of all epochs.

    `stride` is B, and `state`, int64 [3], is epoch, position within the epoch, and pairs of that
    document already used. A document of fewer than two ids has no pair and is skipped.
    """

    def __init__(
        self,
        documents: EncodedDocuments | Sequence[Encoded],
        order: Order,
        stride: int,
        state: np.ndarray,
    ):
        self._documents = documents
        self._order = order
        self._stride = stride
        self._epoch, self._position, self._offset = (int(x) for x in state)
        self._document: Encoded | None = None
        if not self._offset:
            self._go_to(self._epoch * order.num_documents + self._position)

    @property
    def state(self) -> tuple[int, int, int]:
        """Return the position of the next pair: epoch, position, offset."""
        return self._epoch, self._position, self._offset

    def take(self, limit: int) -> Pairs:
        """Return pairs of one document: at least 1, at most `limit`. Raises ConfigError if
        consecutive documents, more than an epoch has, hold no tokens.
        """
        ids, weights = self._current()
        end = min(self._offset + limit, len(ids) - 1)
        of_targets = slice(self._offset + 1, end + 1)
        pairs = Pairs(ids[self._offset : end], ids[of_targets], weights[of_targets])
        self._offset = end
        if end == len(ids) - 1:
            self.skip_rest()
        return pairs

    def skip_rest(self) -> None:
        """Move to the start of the next document."""
        draw = self._epoch * self._order.num_documents + self._position
        self._go_to(draw + self._stride)

    def _go_to(self, draw: int) -> None:
        first = self._order.first_draw
        draw = max(draw, first + (draw - first) % self._stride)
        self._epoch, self._position = divmod(draw, self._order.num_documents)
        self._offset = 0
        self._document = None

    def _current(self) -> Encoded:
        # Each epoch has its own order: empty documents that end one may begin the next, too.
        attempts = self._order.num_documents + 100
        for _ in range(attempts):
            if self._document is None:
                self._document = self._documents[self._order(self._epoch, self._position)]
            if len(self._document.ids) > self._offset + 1:
                return self._document
            self.skip_rest()
        raise path_error(
            f"{attempts} documents, one after the other, hold no tokens "
            f"({self._order.num_documents} in all)"
        )


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


def fill_row(
    batch: Batch, row: int, stream: RowStream, packing: bool, limit: int | None = None
) -> None:
    """Fill `row` of an empty batch from `stream`, with at most `limit` pairs; without `packing` it
    takes one document and truncates it to the row's length.

    Segments count from 1 within the sequence, positions from 0 within the segment. This also holds
    for a document that continues from the previous sequence, which attention does not reach.
    """
    length = batch["tokens"].shape[1] if limit is None else limit
    start = 0
    segment = 0
    while start < length and (packing or segment == 0):
        pairs = stream.take(length - start)
        end = start + len(pairs.inputs)
        segment += 1
        batch["tokens"][row, start:end] = pairs.inputs
        batch["targets"][row, start:end] = pairs.targets
        batch["positions"][row, start:end] = np.arange(end - start)
        batch["segment_ids"][row, start:end] = segment
        batch["weights"][row, start:end] = pairs.weights
        start = end
        if not packing and stream.state[2]:
            stream.skip_rest()


@dataclass(frozen=True)
class RowSource:
    """Everything except the state that determines a row's contents."""

    documents: EncodedDocuments
    order: Order
    global_batch_size: int  # rows of all processes; the stride of every row
    sequence_length: int
    packing: bool  # whether a sequence holds several documents or one
    pad_id: int
    threads: int  # that fill rows, because these may wait for a store


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
    """The iterator of a `RowDataset`; its state is {"rows": int64 [rows, 3]}."""

    def __init__(self, source: RowSource, state: np.ndarray):
        super().__init__()
        self._source = source
        self._pool = ThreadPoolExecutor(source.threads) if source.threads > 1 else None
        self.set_state({"rows": state})

    def __next__(self) -> tuple[Batch, np.ndarray, str]:
        source = self._source
        batch = empty_batch(len(self._streams), source.sequence_length, source.pad_id)
        each = self._pool.map if self._pool else map
        fill = partial(fill_row, batch, packing=source.packing)
        deque(each(fill, range(len(self._streams)), self._streams), maxlen=0)
        skipped = source.documents.take_skipped()
        return batch, self.get_state()["rows"], json.dumps(skipped) if skipped else ""

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        super().close()

    def get_state(self) -> dict[str, np.ndarray]:
        return {"rows": np.array([stream.state for stream in self._streams], np.int64)}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        source = self._source
        self._streams = [
            RowStream(source.documents, source.order, source.global_batch_size, row)
            for row in state["rows"]
        ]


def prefetched(
    source: RowSource, states: Sequence[np.ndarray], depth: int, processes: bool
) -> list[grain.DatasetIterator]:
    """Return a started iterator over `RowDataset` elements for each of `states`, int64 [rows, 3].

    Each prefetches `depth` elements, in a worker process of its own or in a thread.
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
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def exit_with_parent() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    # If the parent is killed, only this thread ends the worker.
    threading.Thread(target=exit_with_parent, daemon=True).start()
