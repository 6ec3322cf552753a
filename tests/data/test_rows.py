"""Packed and unpacked rows, compared with their documents, and the order of documents."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe.data.documents import Encoded
from maxpipe.data.rows import DocumentOrder, RowStream, empty_batch, fill_row

PAD = -1


def _framed(lengths):
    return [1000 * i + np.arange(n + 2 if n else 0, dtype=np.int32) for i, n in enumerate(lengths)]


def _streams(documents, batch, shuffle=True):
    n = len(documents)
    encoded = [Encoded(ids, ids % 2 + 1.0) for ids in documents]
    order = DocumentOrder(n, seed=0, shuffle=shuffle)
    states = [np.array([row // n, row % n, 0]) for row in range(batch)]
    return [RowStream(encoded, order, batch, state) for state in states]


def _next_batch(streams, length, packing=True):
    batch = empty_batch(len(streams), length, PAD)
    for row, stream in enumerate(streams):
        fill_row(batch, row, stream, packing)
    return batch


FULL = st.lists(st.integers(1, 30), min_size=1, max_size=12)
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)
BATCH, LENGTH = st.integers(1, 6), st.integers(1, 20)


@settings(max_examples=60, deadline=None)
@given(lengths=FULL, batch=BATCH, length=LENGTH)
def test_row_streams_visit_every_pair_once_per_epoch(lengths, batch, length):
    documents = _framed(lengths)
    seen = []
    for stream in _streams(documents, batch):
        while stream.state[0] == 0:
            inputs, targets, weights = stream.take(length)
            assert weights.tolist() == (targets % 2 + 1.0).tolist()
            seen += [*zip(inputs.tolist(), targets.tolist(), strict=True)]
    expected = [pair for ids in documents for pair in pairwise(ids.tolist())]
    assert sorted(seen) == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, batch=BATCH, length=LENGTH)
def test_fill_row_packing_fills_rows_without_crossing_documents(lengths, batch, length):
    streams = _streams(_framed(lengths), batch)
    for _ in range(4):
        rows = _next_batch(streams, length)
        assert (rows["weights"] == rows["targets"] % 2 + 1).all()
        # Ids count up within a document, so a target from another document is never input + 1.
        assert (rows["targets"] == rows["tokens"] + 1).all()
        same = np.diff(rows["segment_ids"], axis=1) == 0
        assert (rows["tokens"][:, 1:] == rows["targets"][:, :-1])[same].all()
        assert (rows["segment_ids"][:, 0] == 1).all()
        assert np.isin(np.diff(rows["segment_ids"], axis=1), [0, 1]).all()
        assert (rows["positions"][:, 0] == 0).all()
        assert (np.diff(rows["positions"], axis=1)[same] == 1).all()
        assert (rows["positions"][:, 1:][~same] == 0).all()
        # Segments begin where documents begin, and nowhere else.
        assert (rows["tokens"][:, 1:][~same] % 1000 == 0).all()
        assert (rows["tokens"][:, 1:][same] % 1000 != 0).all()


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, length=LENGTH)
def test_fill_row_without_packing_holds_one_document(lengths, length):
    documents = _framed(lengths)
    full = [i for i, n in enumerate(lengths) if n]
    streams = _streams(documents, batch=1, shuffle=False)
    for k in range(2 * len(full)):
        row = _next_batch(streams, length, packing=False)
        ids = documents[full[k % len(full)]]
        used = min(length, len(ids) - 1)
        targets, padding = ids[1 : used + 1], [0] * (length - used)
        expected = {
            "tokens": [*ids[:used], *[PAD] * (length - used)],
            "targets": [*targets, *[PAD] * (length - used)],
            "segment_ids": [1] * used + padding,
            "weights": [*(targets % 2 + 1.0), *padding],
            "positions": [*range(used), *padding],
        }
        assert {name: array[0].tolist() for name, array in row.items()} == expected


def test_document_order_epoch_is_permutation():
    for shuffle in [False, True]:
        for count in [1, 2, 7, 1000]:
            order = DocumentOrder(count, seed=3, shuffle=shuffle)
            for epoch in (0, 1, 2**32):
                assert sorted(order(epoch, i) for i in range(count)) == list(range(count))


def test_document_order_of_saved_runs_never_changes():
    """A saved position refers to this order: with another, documents would repeat or be lost."""

    def visit(seed, epoch, shuffle=True):
        order = DocumentOrder(10, seed, shuffle)
        return [order(epoch, i) for i in range(10)]

    assert visit(0, 0) == [0, 4, 6, 7, 8, 3, 1, 9, 5, 2]
    assert visit(0, 1) == visit(1, 0) != visit(0, 0)
    assert visit(0, 0, shuffle=False) == visit(0, 1, shuffle=False) == list(range(10))
