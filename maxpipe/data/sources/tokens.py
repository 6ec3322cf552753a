"""Provide token ids: memory-mapped files of ids made in advance, and random ids.

Files are flat little-endian .bin files or one-dimensional .npy files. A .bin file holds uint16 if
the vocabulary of `data.tokenizer` has at most 65,536 ids, uint32 otherwise.

Where documents end: `shard.idx.npy` next to `shard.bin`, if there is one, holds the position of
each document's first token (integers, ascending, the first 0; write it with numpy.save). Without it
each end-of-document token of `data.tokenizer` ends a document, and opening the file scans it once.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation
from maxpipe.data.files import files_of, find_all, path_error
from maxpipe.data.tokenizers import Tokenizer, load_tokenizer

INDEX_SUFFIX = SOURCES["token_bin"].companion
NUM_SYNTHETIC = 1 << 16  # documents of random ids
MOST_MAPPED = 128  # files mapped at a time


class TokenFile:
    """The documents of a .bin file of a dtype such as `<u2`, or of a .npy file; `eos_id` ends those
    of files without an index, and is no part of them.
    """

    def __init__(self, path: str, dtype: str, eos_id: int):
        self._path = path
        self._dtype = dtype
        self._spans = _document_spans(path, map_tokens(path, dtype), eos_id)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> np.ndarray:
        start, end = self._spans[index].tolist()
        return np.array(map_tokens(self._path, self._dtype)[start:end])

    def lengths(self) -> np.ndarray:
        return self._spans[:, 1] - self._spans[:, 0]


# Mappings are cached per process, outside the object, because pickling a memmap would copy the file
# to every worker. Each holds a file descriptor, of which macOS gives a process 256.
@lru_cache(maxsize=MOST_MAPPED)
def map_tokens(path: str, dtype: str) -> np.ndarray:
    """Return the file's tokens, [tokens], read-only."""
    if path.endswith(".npy"):
        return _load_integers(path)
    size, width = Path(path).stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise path_error(
            f"{path} has {size} bytes, not a multiple of the {width} bytes per id of data.tokenizer"
        )
    return np.memmap(path, dtype, mode="r")


def _load_integers(path: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise path_error(f"{path} is not a NumPy array: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "ui" or not array.size:
        raise path_error(f"{path} is {array.dtype} {list(array.shape)}, not a row of integers")
    return array


def _document_spans(path: str, tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Return start and end of each document that is not empty, int64 [documents, 2]."""
    index = Path(path).with_suffix(INDEX_SUFFIX)
    if index.exists():
        starts = np.asarray(_load_integers(str(index)), np.int64)
        if starts[0] != 0 or starts[-1] >= len(tokens) or (np.diff(starts) <= 0).any():
            raise path_error(
                f"{index} does not ascend from 0 to below the {len(tokens)} tokens of {path}"
            )
        return np.stack([starts, np.append(starts[1:], len(tokens))], axis=1)
    ends = np.append(find_all(tokens, eos_id), len(tokens))
    if len(ends) == 1:
        raise path_error(
            f"{path} holds no end-of-document token {eos_id} of data.tokenizer "
            f"and has no {index.name}"
        )
    starts = np.concatenate([[0], ends[:-1] + 1])
    return np.stack([starts, ends], axis=1)[ends > starts]


def token_bin(config: DataConfig) -> Concatenation:
    """Return the documents of the files of `data.path` (in a directory: *.bin and *.npy) in sorted
    order; raises ConfigError if one is empty, of another format, or without document ends.
    """
    tokenizer = load_tokenizer(config.tokenizer, config.cache_dir)
    files = [path for path in files_of(config, "token_bin") if not path.endswith(INDEX_SUFFIX)]
    dtype = dtype_of(tokenizer).str
    return Concatenation([TokenFile(path, dtype, tokenizer.eos_id) for path in files])


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of .bin files that hold a tokenizer's ids."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


class SyntheticDocuments:
    """Documents of 1 to `max_tokens` ids other than `eos_id`, drawn uniformly; document i is a pure
    function of i.
    """

    def __init__(self, vocab_size: int, eos_id: int, max_tokens: int):
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> np.ndarray:
        random = np.random.default_rng(index)
        size = random.integers(1, self._max_tokens, endpoint=True)
        ids = random.integers(self._vocab_size - 1, size=size)
        return (ids + (ids >= self._eos_id)).astype(np.int32)


def synthetic(config: DataConfig) -> SyntheticDocuments:
    """Return random documents of one data.sequence_length on average, to measure speed."""
    tokenizer = load_tokenizer(config.tokenizer, config.cache_dir)
    return SyntheticDocuments(tokenizer.vocab_size, tokenizer.eos_id, 2 * config.sequence_length)
