"""Encode a corpus into token files once, in parallel, so that a run only maps them.

Each file holds about `PART_BYTES` of text or more: `part-00000.bin` has the tokens of its
documents, each followed by the end of document, and `part-00000.idx.npy` where each begins, as
`data.source=token_bin` reads them. `encoding.json` records what was encoded, and with which
tokenizer. A file is complete once it has its name, so a repeated command encodes what is missing.
"""

import functools
import hashlib
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import import_variants
from maxpipe.data.corpus import Corpus, text_of, unwritable
from maxpipe.data.documents import BadDocument, Documents
from maxpipe.data.fingerprint import tokenizer_digest
from maxpipe.data.sources.tokens import INDEX_SUFFIX, MOST_MAPPED, dtype_of
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.storage.local_files import RECORD, sampled_digest, write_atomically
from maxpipe.storage.records import Damaged, read_record

PART_BYTES = 8 << 20
MOST_PARTS = MOST_MAPPED  # so that a run maps each once; a larger corpus has larger parts
NO_TOKENS = ".empty"  # replaces the .bin file of a part without tokens, which a run would refuse
_OUT = "--out"


class Part(NamedTuple):
    """Documents `start` to `end` of the corpus, which become one file."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Encoding:
    """What to encode, with which tokenizer, and where to."""

    corpus: Corpus
    tokenizer: str  # as in `data.tokenizer`
    out: Path  # directory of the token files
    skips_bad: bool = False  # whether texts that cannot be read are left out
    imports: tuple[str, ...] = ()  # modules that add variants, such as the tokenizer

    def parts(self) -> list[Part]:
        """Return all parts, the same at every call for the same files."""
        size = sum(os.path.getsize(file) for file in self.corpus.files)
        count = len(self.corpus.open())
        number = max(1, min(-(-size // PART_BYTES), count, MOST_PARTS))
        edges = [count * i // number for i in range(number + 1)]
        return [Part(f"part-{i:05}", edges[i], edges[i + 1]) for i in range(number)]

    def begin(self) -> None:
        """Make the directory and record what is encoded; raises ConfigError, before anything is
        written, if the directory has tokens of another encoding or other files.
        """
        record, file = self._record(), self.out / RECORD
        problem = ""
        try:
            if file.is_file():
                known = read_record(file, dict[str, object])
                changed = [name for name, value in record.items() if known.get(name) != value]
                if changed:
                    names = ", ".join(changed)
                    problem = f"holds tokens of another encoding, which differs in {names}"
            elif self.out.is_dir() and any(self.out.iterdir()):
                problem = "has other files"
            else:
                self.out.mkdir(parents=True, exist_ok=True)
                write_atomically(file, [json.dumps(record, indent=2).encode() + b"\n"])
        except OSError as error:
            raise unwritable(self.out, error) from None
        except Damaged:
            problem = f"has a damaged {RECORD}"
        if problem:
            message = f"{self.out} {problem}: choose another directory, or delete it"
            raise ConfigError(Problem(_OUT, message))

    def is_done(self, part: Part) -> bool:
        """Return whether a part has its file, or is known to have no tokens."""
        return any((self.out / f"{part.name}{end}").is_file() for end in (".bin", NO_TOKENS))

    def _record(self) -> dict[str, object]:
        digest = hashlib.blake2b(digest_size=8)
        for file in self.corpus.files:
            size = os.path.getsize(file)
            digest.update(f"{size} {sampled_digest(file, size)}\n".encode())
        return {
            "tokenizer": tokenizer_digest(self.tokenizer, self.corpus.cache_dir),
            "source": self.corpus.source,
            "files": len(self.corpus.files),
            "contents": digest.hexdigest(),
            "sequence_length": self.corpus.sequence_length if self.corpus.is_cut else None,
            "part_bytes": PART_BYTES,
            "most_parts": MOST_PARTS,
        }


def encode_parts(
    encoding: Encoding, parts: list[Part], workers: int
) -> Iterator[tuple[Part, list[str]]]:
    """Encode parts in worker processes, or in this one if `workers` is 1, and yield each with the
    reason for each document that was left out, as soon as its file is written; raises ConfigError
    if a text cannot be read.
    """
    encode = functools.partial(_encode_part, encoding)
    if workers == 1 or len(parts) < 2:
        yield from map(encode, parts)
        return
    # Libraries of this process have threads, which a forked process would lose.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(workers, len(parts)), context, _be_one_of_several, (encoding.imports,)
    ) as pool:
        waiting = [pool.submit(encode, part) for part in parts]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BrokenProcessPool:
            message = f"{workers} processes are too many for the memory: one was ended; give fewer"
            raise ConfigError(Problem("--workers", message)) from None
        finally:
            # After an error or Ctrl-C nothing is waited for: files appear whole or not at all.
            for process in multiprocessing.active_children():
                process.terminate()


def summary(encoding: Encoding, parts: list[Part]) -> tuple[int, int]:
    """Return the numbers of documents and of tokens, with ends of documents, in all files."""
    width = dtype_of(load_tokenizer(encoding.tokenizer, encoding.corpus.cache_dir)).itemsize
    num_documents = num_tokens = 0
    for part in parts:
        path = encoding.out / f"{part.name}.bin"
        if path.is_file():
            # A mapping holds a file descriptor, and these are few, so none is kept.
            num_documents += len(np.load(path.with_suffix(INDEX_SUFFIX), mmap_mode="r"))
            num_tokens += path.stat().st_size // width
    return num_documents, num_tokens


def _be_one_of_several(imports: tuple[str, ...]) -> None:
    """Set up a worker process: it has one core, and its parent handles Ctrl-C."""
    import_variants(imports)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@functools.cache
def _open(corpus: Corpus) -> Documents:
    return corpus.open()


def _encode_part(encoding: Encoding, part: Part) -> tuple[Part, list[str]]:
    """Encode one part and write its files, last the one that marks it as done."""
    tokenizer = load_tokenizer(encoding.tokenizer, encoding.corpus.cache_dir)
    documents = _open(encoding.corpus)
    dtype = dtype_of(tokenizer)
    content = io.BytesIO()
    starts, num_tokens, skipped = list[int](), 0, list[str]()
    for index in range(part.start, part.end):
        try:
            text = text_of(documents, index)
        except BadDocument as error:
            if not encoding.skips_bad:
                remedy = Problem("--on-bad-document", "skip leaves such texts out, and goes on")
                raise ConfigError(*error.problems, remedy) from error
            skipped.append(str(error))
            continue
        ids = tokenizer.encode(text)
        if not ids.size:
            continue
        starts.append(num_tokens)
        num_tokens += ids.size + 1
        content.write(ids.astype(dtype).tobytes())
        content.write(np.array([tokenizer.eos_id], dtype).tobytes())
    index_file = io.BytesIO()
    np.save(index_file, np.array(starts, np.int64))
    try:
        path = encoding.out / part.name
        if starts:
            write_atomically(path.with_suffix(INDEX_SUFFIX), [index_file.getvalue()])
        end = ".bin" if starts else NO_TOKENS
        write_atomically(path.with_suffix(end), [content.getvalue()])
    except OSError as error:
        raise unwritable(encoding.out, error) from None
    return part, skipped
