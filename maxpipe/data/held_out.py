"""Choose what evaluations read: places of the whole held-out text, the same in each evaluation.

The held-out documents, one after the other, are cut into chunks of up to T tokens to predict; with
`data.packing=false` a document begins a chunk of its own. An evaluation of W rows takes one chunk
at random in each of W equal stretches of the text, or all chunks if there are no more. The chances
of all tokens are therefore equal, and none counts twice. The choice follows from the text alone.

Counting the tokens of everything held out may take hours, so a large set is judged by documents
drawn at random, `COUNTED` tokens of them or twice what is evaluated.

Shapes: B rows of a batch, R rows of this process, T tokens of a row.
"""

import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.data.documents import (
    Encoded,
    EncodedDocuments,
    describe_held_out,
    is_mixed,
    open_sources,
)
from maxpipe.data.loader import (
    SKIPPED_NAMED,
    STREAM_THREADS,
    encoder_of,
    open_tokenizer,
    source_names,
)
from maxpipe.data.rows import Batch, DocumentOrder, RowStream, empty_batch, fill_row, order_of

COUNTED = 1 << 20  # tokens
# Up to T tokens to predict: number of a document, tokens after its begin, number of tokens.
Chunk = tuple[int, int, int]


class Text:
    """The held-out text of one source, in memory, or a sample of its documents.

    After `enough` tokens no more documents are read. `row` is T, and with `packing` a chunk
    continues with the next document.

    Attributes:
      documents: the documents that were read, in order, of all `num_documents`.
      held_out_of: number of documents of which these are a part; 0 for a set of its own.
      chunks: number of chunks.
      tokens: number of tokens to predict in the documents that were read.
    """

    def __init__(self, encoder: EncodedDocuments, enough: float, row: int, packing: bool):
        self.num_documents = len(encoder)
        self.held_out_of = getattr(encoder.documents, "num_whole", 0)
        order = order_of(encoder.documents, 0, shuffle=True, rows=1)
        read: dict[int, Encoded] = {}
        self.tokens = 0
        threads = STREAM_THREADS if getattr(encoder.documents, "blocks", None) else 1
        with ThreadPoolExecutor(threads) as pool:
            while len(read) < len(encoder) and self.tokens < enough:
                places = range(len(read), min(len(read) + threads, len(encoder)))
                indices = [order(0, place) for place in places]
                read.update(zip(indices, pool.map(encoder.__getitem__, indices), strict=True))
                self.tokens += sum(max(len(read[index].ids) - 1, 0) for index in indices)
        self.documents = [read[index] for index in sorted(read)]
        self._pairs = np.array([max(len(ids) - 1, 0) for ids, _ in self.documents], np.int64)
        ends = np.cumsum(self._pairs if packing else -(-self._pairs // row) * row)
        self._starts = np.append(0, ends)  # of documents among the chunks, in tokens
        self._row, self._packing = row, packing
        self.chunks = int(-(-ends[-1] // row))

    @property
    def all_tokens(self) -> float:
        """Return the number of tokens to predict in all documents, estimated from a sample."""
        return self.tokens * self.num_documents / len(self.documents)

    def choose(self, count: int) -> list[Chunk]:
        """Return `count` chunks, one from each of as many equal stretches of the text."""
        digest = 0
        for ids, _ in self.documents:
            digest = zlib.crc32(ids.tobytes(), digest)
        random = np.random.default_rng([digest, self.chunks])
        bounds = np.arange(count + 1) * self.chunks // count
        drawn = bounds[:-1] + (random.random(count) * np.diff(bounds)).astype(np.int64)
        # Stretches differ by one chunk; where they begin is random, too.
        chosen = np.sort((drawn + random.integers(self.chunks)) % self.chunks)
        starts = chosen * self._row
        documents = np.searchsorted(self._starts, starts, side="right") - 1
        of_documents = self._starts[documents]
        ends = self._starts[-1] if self._packing else of_documents + self._pairs[documents]
        lengths = np.minimum(self._row, ends - starts)
        return [
            *zip(
                documents.tolist(), (starts - of_documents).tolist(), lengths.tolist(), strict=True
            )
        ]


class HeldOut:
    """At most `num_batches` batches of an evaluation; iterating begins anew each time.

    A batch is as those of `Loader`; the last may end with rows of padding, whose weights are 0.
    Weights of a mixture's sources are scaled, so that each has its share of the tokens, which
    `shares` are of, in any unit.
    """

    def __init__(
        self,
        config: Config,
        texts: Sequence[Text],
        shares: Sequence[float],
        rows: Sequence[int],
        num_batches: int,
    ):
        self._rows, self._pad_id = rows, open_tokenizer(config).pad_id
        self._size, self._data = config.eval.global_batch_size, config.data
        self._texts = texts
        counts = _divide(shares, [text.chunks for text in texts], num_batches * self._size)
        chosen = [text.choose(n) if n else [] for text, n in zip(texts, counts, strict=True)]
        taken = [sum(length for _, _, length in chunks) for chunks in chosen]
        self.tokens = sum(taken)
        of_taken = sum(share for share, n in zip(shares, taken, strict=True) if n)
        self._chunks = [
            (text, *chunk, share / of_taken * (self.tokens / n))
            for text, chunks, share, n in zip(texts, chosen, shares, taken, strict=True)
            for chunk in chunks
        ]
        self.num_batches = -(-len(self._chunks) // self._size)

    def __str__(self) -> str:
        is_sample = any(len(text.documents) < text.num_documents for text in self._texts)
        total = round(sum(text.all_tokens for text in self._texts))
        evaluated = f"evaluates {self.tokens:,} of {'about ' * is_sample}{total:,} tokens"
        if not (whole := sum(text.held_out_of for text in self._texts)):
            return evaluated
        held_out = describe_held_out(sum(text.num_documents for text in self._texts), whole)
        return f"{held_out}; {evaluated}"

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._chunks), self._size):
            batch = empty_batch(len(self._rows), self._data.sequence_length, self._pad_id)
            for row, number in enumerate(self._rows):
                if first + number >= len(self._chunks):
                    continue
                text, document, offset, length, scale = self._chunks[first + number]
                order = DocumentOrder(len(text.documents), 0, shuffle=False)
                stream = RowStream(text.documents, order, 1, np.array([0, document, offset]))
                fill_row(batch, row, stream, self._data.packing, length)
                batch["weights"][row] *= scale
            yield batch


def open_held_out(config: Config, rows: Sequence[int]) -> tuple[HeldOut | None, dict[str, HeldOut]]:
    """Return what evaluations read: of the whole, and of each source of a mixture by its name.

    There is nothing without `eval.every`, and no source without `eval.batches_per_source`; `rows`
    are this process's rows of a batch. Raises ConfigError if files are missing or unusable, the
    split is empty or a document unreadable.
    """
    if not config.eval.every:
        return None, {}
    data, batches = config.data, config.eval.batches
    sources = open_sources(data, "eval")
    evaluated = batches * config.eval.global_batch_size * data.sequence_length
    enough = max(COUNTED, 2 * evaluated) if batches else np.inf
    texts = []
    for documents in sources:
        encoder = encoder_of(config, documents)
        texts.append(Text(encoder, enough, data.sequence_length, data.packing))
        for reason in [*encoder.take_skipped().values()][:SKIPPED_NAMED]:
            print(f"skipped a held-out document: {reason}", file=sys.stderr, flush=True)
    if not sum(text.tokens for text in texts):
        key = "data.eval_path" if data.eval_path else "data.path"
        raise ConfigError(Problem(key, "the held-out documents hold no tokens"))
    mixed = is_mixed(data, "eval")
    weights = [entry["weight"] for entry in data.mixture] if mixed else [1.0]
    if data.mixture_by == "documents":
        # Training draws documents, so a source's share of the tokens depends on their length.
        weights = [w * t.tokens / len(t.documents) for w, t in zip(weights, texts, strict=True)]
    most = batches or sum(text.chunks for text in texts)
    per_source = config.eval.batches_per_source if mixed else 0
    names = source_names(data) if per_source else []
    by_source = {
        name: HeldOut(config, [text], [1.0], rows, per_source)
        for name, text in zip(names, texts, strict=False)
    }
    return HeldOut(config, texts, weights, rows, most), by_source


def _divide(shares: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """Return how many of `total` rows each source has: by share, at most what it has, not none."""
    if total >= sum(most):
        return list(most)
    exact = np.array(shares) / sum(shares) * total
    counts = np.maximum(np.round(exact).astype(int), 1)
    while counts.sum() > total:
        counts[np.argmax(counts)] -= 1
    return np.minimum(counts, most).tolist()
