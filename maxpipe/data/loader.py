"""Load this process's rows of every batch, and keep their positions in the data.

Batch N is a pure function of (seed, data configuration, N). Each of the B rows of the global batch
is a stream of its own over documents (`maxpipe.data.rows`), whose state is three integers. A run
therefore continues exactly from the saved array, whatever the number of processes, workers or
prefetched batches.

Shapes: B global batch size, R rows of this process, T sequence length.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from maxpipe.config.base_model import base_tokenizer
from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import ACCEPT
from maxpipe.config.sections import Config, DataConfig
from maxpipe.data.chat_template import trained_template, without_token
from maxpipe.data.documents import (
    BadDocument,
    Documents,
    EncodedDocuments,
    Split,
)
from maxpipe.data.files import path_error
from maxpipe.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer, needed_ids
from maxpipe.storage.object_store import closing

if TYPE_CHECKING:
    import grain

    from maxpipe.data.rows import Batch, Era


SKIPPED_NAMED = 5  # how many skipped documents are named
STREAM_THREADS = 16  # that read row groups


class Loader(Iterator["Batch"]):
    """An endless iterator of batches, made by `make_loader`.

    `next(loader)` returns `tokens`, `targets`, `positions`, `segment_ids` (int32 [R, T]) and
    `weights` (float32 [R, T]): weight 1 for targets, 0 for padding and what anyone but the
    assistant says in a conversation; segments from 1, 0 for padding; positions from 0 within each
    segment.

    Iterator w of `iterators` yields (batch, state, skipped) of rows w::len(iterators). `skipped`
    holds the indices of all documents that were skipped, which `close` counts.
    """

    def __init__(
        self, iterators: "list[grain.DatasetIterator]", state: np.ndarray, num_documents: int
    ):
        self.num_documents = num_documents
        self._iterators = iterators
        self.skipped: set[str] = set()
        self._is_closed = False
        self._state = state

    def __next__(self) -> "Batch":
        elements = [next(iterator) for iterator in self._iterators]
        batches, states, skipped = zip(*elements, strict=True)
        self._state = _interleave(states)
        for reasons in filter(None, skipped):
            for index, reason in json.loads(reasons).items():
                if index not in self.skipped and len(self.skipped) < SKIPPED_NAMED:
                    print(f"skipped a document: {reason}", file=sys.stderr, flush=True)
                self.skipped.add(index)  # all of them are counted
        return {name: _interleave([batch[name] for batch in batches]) for name in batches[0]}

    @property
    def state(self) -> np.ndarray:
        """Return the state after the last batch: a copy, int64 [R, 3] (epoch, position, offset)."""
        return self._state.copy()

    def close(self) -> None:
        """Stop threads and worker processes; may be called twice."""
        closing.set()
        for iterator in self._iterators:
            iterator.close()
        closing.clear()
        if self.skipped and not self._is_closed:
            count = f"{len(self.skipped):,} of {self.num_documents:,} documents were skipped"
            print(f"{count} (data.on_bad_document=skip)", file=sys.stderr, flush=True)
        self._is_closed = True


def make_loader(
    config: Config,
    split: Split,
    rows: Sequence[int],
    state: np.ndarray | None = None,
    eras: "Sequence[Era]" = (),
) -> Loader:
    """Return a loader of this process's rows of the global batch.

    It continues from `state`, int64 [R, 3], the `Loader.state` of these rows; None starts at the
    beginning. `eras` are changes of a mixture's weights. Raises ConfigError if files are missing or
    unusable, the split is empty, model.vocab_size is too small, or `state` does not belong to these
    documents and rows; `next(loader)` raises it if a document cannot be read.
    """
    # These import grain, which takes longer than reporting a configuration error should take.
    from maxpipe.data.rows import RowSource, open_mixture, prefetched

    data = config.data
    batch_size = global_batch_size(config, split)
    assert len(rows) > 0
    assert all(0 <= row < batch_size for row in rows)
    # All batches of a ramp follow the order of the last.
    most = data.batch_ramp[-1][1] if data.batch_ramp else batch_size
    documents, order = open_mixture(data, split, config.seed, most, eras)
    if state is None:
        state = initial_state(rows, len(documents))
    check_state(state, rows, len(documents), batch_size)
    source = RowSource(
        documents=encoder_of(config, documents),
        order=order,
        global_batch_size=batch_size,
        sequence_length=data.sequence_length,
        packing=data.packing,
        pad_id=open_tokenizer(config).pad_id,
        threads=STREAM_THREADS if data.stream else 1,
    )
    workers = min(max(data.num_workers, 1), len(rows))
    states = [state[worker::workers] for worker in range(workers)]
    iterators = prefetched(source, states, data.prefetch, processes=data.num_workers > 0)
    return Loader(iterators, state, len(documents))


def source_names(data: DataConfig) -> list[str]:
    """Return a name for each entry of a mixture: its source, with the path if sources repeat."""
    names = [
        entry["source"]
        if data.sources.count(entry["source"]) == 1
        else f"{entry['source']}:{entry.get('path', '')}"
        for entry in data.mixture
    ]
    return [
        name if names.count(name) == 1 else f"{name}#{number}"
        for number, name in enumerate(names, 1)
    ]


def encoder_of(
    config: Config, documents: Documents, skips_bad: bool | None = None
) -> EncodedDocuments:
    """Return documents as a run reads them; errors are those of `open_tokenizer`."""
    tokenizer, num_ids = open_tokenizer(config), config.model.num_token_ids
    if skips_bad is None:
        skips_bad = config.data.on_bad_document == "skip"
    return EncodedDocuments(documents, tokenizer, num_ids, skips_bad)


def open_tokenizer(config: Config) -> Tokenizer:
    """Return the tokenizer of a run; raises ConfigError if it is unusable, or model.vocab_size is
    too small for it.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer, data.cache_dir)
    needed = needed_ids(tokenizer, config.model)
    if needed > config.model.num_token_ids:
        message = (
            f"{config.model.num_token_ids} is too small: data.tokenizer={data.tokenizer} needs at "
            f"least {needed}"
        )
        is_padded = config.model.num_token_ids < config.model.vocab_size
        key = "model.unpadded_vocab_size" if is_padded else "model.vocab_size"
        raise ConfigError(Problem(key, message))
    return tokenizer


def check_base_tokenizer(config: Config) -> None:
    """Raise ConfigError if a run from a base model gives the base's tokens other ids, unless
    `checkpoint.accept_changes` names the tokenizer.
    """
    data = config.data
    base = base_tokenizer(config.init_from, config.model.from_hf) if config.init_from else ""
    is_read = any(SOURCES[source].needs_tokenizer for source in data.sources)
    if not base or not is_read or "tokenizer" in config.checkpoint.accept_changes:
        return
    tokenizers = [load_tokenizer(name, data.cache_dir) for name in (data.tokenizer, base)]
    ours, theirs = (getattr(each, "vocabulary", {}) for each in tokenizers)
    is_same = tokenizers[0] is tokenizers[1]
    if not (is_same or (theirs and theirs.items() <= ours.items())):
        message = (
            f"{data.tokenizer} gives tokens other ids than {base}, the base model's tokenizer: "
            f"leave the key out, or accept another with {ACCEPT}=[tokenizer]"
        )
        raise ConfigError(Problem("data.tokenizer", message))


def tokenizer_notes(config: Config) -> list[str]:
    """Return how documents begin, if the tokenizer leaves a doubt, which tokens have no ids, and
    what adapters hardly learn because the rows of its tokens are frozen.
    """
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.cache_dir)
    notes = []
    if isinstance(tokenizer, HuggingFaceTokenizer):
        begin = tokenizer.frame.begin
        if ids := begin or ([] if tokenizer.bos_id is None else [tokenizer.bos_id]):
            how = "with" if begin else "without"
            tokens = tokenizer.decode(ids, skip_special_tokens=False)
            notes.append(f"documents and prompts begin {how} {tokens}, as in transformers")
    vocabulary: Mapping[str, int] = getattr(tokenizer, "vocabulary", {})
    unknown = [name for name, i in vocabulary.items() if i >= config.model.num_token_ids]
    if unknown:
        names = ", ".join(sorted(unknown, key=vocabulary.__getitem__)[:3])
        what = f"{len(unknown)} of the tokenizer's tokens, such as {names}"
        notes.append(f"the model has no ids for {what}; texts must not have them")
    if config.model.lora.rank and (template := trained_template(config.data)):
        with suppress(BadDocument):  # such a template lays out other conversations
            if end := template.end_of_turn(tokenizer)[1]:
                remedy = (
                    "fine-tune whole (model.lora.rank=0), or take a base that learned such a token"
                )
                why = "adapters hardly learn it, since rows of tokens are frozen"
                notes.append(f"{without_token(end)}, and {why}: {remedy}")
    return notes


def token_bytes(config: Config) -> np.ndarray | None:
    """Return the number of text bytes per token id, int32 [model.vocab_size]; None if unknown."""
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.cache_dir)
    counts = getattr(tokenizer, "token_bytes", None)
    if counts is None:
        return None
    known = counts[: config.model.vocab_size]
    return np.pad(known, (0, config.model.vocab_size - len(known)))


def global_batch_size(config: Config, split: Split) -> int:
    if split == "eval" and config.eval.global_batch_size != -1:
        return config.eval.global_batch_size
    return config.data.global_batch_size


def initial_state(rows: Sequence[int], num_documents: int) -> np.ndarray:
    """Return int64 [R, 3]: row r starts at document r of the concatenated epochs."""
    row = np.asarray(rows, np.int64)
    return np.stack([row // num_documents, row % num_documents, np.zeros_like(row)], axis=1)


def moved_state(state: np.ndarray, num_before: int, num_now: int) -> np.ndarray:
    """Return the state, int64 [R, 3], that continues a run whose number of documents has changed:
    every row keeps the number of documents that it has passed, and begins the next.
    """
    if num_before == num_now:
        return state
    epoch, position, offset = state.T
    epoch, position = np.divmod(epoch * num_before + position, num_now)
    return np.stack([epoch, position, np.zeros_like(offset)], axis=1)


def check_state(
    state: np.ndarray, rows: Sequence[int], num_documents: int, batch_size: int
) -> None:
    """Raise ConfigError unless the position of every row is at one of its own documents."""
    epoch, position, offset = state.T
    fits = (epoch >= 0) & (position >= 0) & (position < num_documents) & (offset >= 0)
    if not (fits & ((epoch * num_documents + position) % batch_size == np.asarray(rows))).all():
        raise path_error(
            f"the saved data position does not fit {num_documents} documents and {batch_size} "
            "rows; restore the files and data.global_batch_size that the run began with, or start "
            "a new run"
        )


def _interleave(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Merge rows: row i of part w becomes row w + i * len(parts)."""
    if len(parts) == 1:
        return parts[0]
    rows = np.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    for worker, part in enumerate(parts):
        rows[worker :: len(parts)] = part
    return rows
