"""Read the indexed datasets of Megatron-LM, PREFIX.bin next to PREFIX.idx.

The .bin file holds token ids and nothing else. The .idx file, all little-endian, begins with
`MMIDIDX` and two zero bytes; version 1, uint64; a code of the ids' dtype, uint8; the number of
sequences S and of documents plus one, D + 1, uint64. Three arrays follow: the sequences' lengths in
tokens, int32 [S]; their positions in the .bin file in bytes, int64 [S]; and how many sequences lie
before each document and before the end, int64 [D + 1]. A document is one sequence, or several where
texts were split into sentences. Format: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
"""

import os
import re
import struct
from itertools import accumulate

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation
from maxpipe.data.files import files_of, path_error, require_content
from maxpipe.data.sources.tokens import map_tokens

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_PAIR = r"([\d.]+(?:[eE][+-]?\d+)?)\s+(\S+)"  # weight and path, as Megatron-LM mixes files
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


class IndexedFile:
    """The documents of a .bin file."""

    def __init__(self, path: str):
        self._path = path
        self._index = os.path.splitext(path)[0] + SOURCES["megatron"].companion
        if not os.path.isfile(self._index):
            raise path_error(f"there is no {self._index}, which Megatron-LM writes with {path}")
        require_content([self._index])
        dtype, lengths, positions, _ = map_index(self._index)
        ends = positions[-1:] + lengths[-1:] * np.int64(np.dtype(dtype).itemsize)
        if os.path.getsize(path) < ends.sum():
            raise path_error(f"{path} is cut short: {self._index} speaks of {ends.sum():,} bytes")

    def __len__(self) -> int:
        return len(map_index(self._index)[-1]) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        dtype, lengths, positions, documents = map_index(self._index)
        first, end = documents[index : index + 2].tolist()
        start = int(positions[first]) // np.dtype(dtype).itemsize if first < end else 0
        size = int(lengths[first:end].sum(dtype=np.int64))
        return np.array(map_tokens(self._path, dtype)[start : start + size] if size else [], dtype)

    def lengths(self) -> np.ndarray:
        _, lengths, _, documents = map_index(self._index)
        return np.diff(np.append(0, np.cumsum(lengths, dtype=np.int64))[documents])


def map_index(path: str) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Return the dtype of ids and the three arrays of an .idx file, mapped; raises ConfigError if
    it is another file, or damaged.
    """
    content = np.asarray(map_tokens(path, "|u1"))
    header = content[: _HEADER.size].tobytes().ljust(_HEADER.size)
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    starts = [*accumulate((_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents))]
    is_index = (magic, version) == (_MAGIC, 1) and code in _DTYPES and starts[-1] <= len(content)
    if is_index:
        _, lengths, positions, bounds, _ = np.split(content, starts)
        bounds = bounds.view("<i8")
        if bounds[:1].tolist() + bounds[-1:].tolist() == [0, sequences]:
            return _DTYPES[code], lengths.view("<i4"), positions.view("<i8"), bounds
    raise path_error(f"{path} is not Megatron-LM's index of token ids, or is cut short")


def megatron(config: DataConfig) -> Concatenation:
    """Return the documents of the .bin files of `data.path` in sorted order; raises ConfigError if
    one is damaged or lacks its index.
    """
    if re.fullmatch(rf"(?:{_PAIR}(?:\s+|$)){{2,}}", config.path):
        pairs = re.findall(_PAIR, config.path)
        entries = ", ".join(f"{{source: megatron, path: {p}, weight: {w}}}" for w, p in pairs)
        raise path_error(f'give a blend as data.mixture_by=tokens data.mixture="[{entries}]"')
    paths = files_of(config, "megatron", may_be_empty=True)  # as of a shard without documents
    return Concatenation([IndexedFile(path) for path in paths])
