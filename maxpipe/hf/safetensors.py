"""Read and write the safetensors format: a JSON header, then the bytes of all tensors.

The format is simple, and the library has no bfloat16 for NumPy. Files are read by byte ranges, so
that only what is asked for is read, from a disk or an object store.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeGuard

import ml_dtypes
import numpy as np

from maxpipe.config.errors import ConfigError
from maxpipe.config.model_places import ModelFile, ModelFolder

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"  # name of a model's only file
CACHE_LINE = 64  # bytes
ALL = slice(None)
_MAX_HEADER = 100 << 20  # the library's own bound
_FIRST_READ = 1 << 17  # bytes, enough for the header of most files
_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SafetensorsError(Exception):
    """Files do not follow the format: a line for each problem, which names the file."""

    def __init__(self, *problems: str):
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(self.problems)


class WeightTensor(Protocol):
    """A floating-point tensor of a model, however files store it."""

    @property
    def dtype(self) -> str:
        """Return the name of its format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int:
        """Return how many bytes it takes in files."""

    @property
    def rows_at_once(self) -> int:
        """Return how many rows to read at a time; 0 = any number."""

    def read_rows(self, first: int, stop: int, columns: slice = ALL) -> np.ndarray:
        """Return rows [stop - first, ..., columns]: some of its first and last dimension."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file."""

    file: ModelFile
    dtype: str  # the format's name of it; `read` knows some of them
    shape: tuple[int, ...]
    offset: int  # position of its first byte in the file

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes; `read` must know the dtype."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of a row, which is one index of the first dimension."""
        return math.prod(self.shape[1:]) * _DTYPES[self.dtype].itemsize

    @property
    def rows_at_once(self) -> int:
        """Return how many rows to read at a time; 0 = any number, for a mapped file."""
        size = self.file.block_size
        return max(1, size // self.row_bytes) if size else 0

    def read(self) -> np.ndarray:
        """Return the tensor; from a local file only what is indexed is read."""
        data = self.file.read(self.offset, self.offset + self.num_bytes)
        return data.view(_DTYPES[self.dtype]).reshape(self.shape)

    def read_rows(self, first: int, stop: int, columns: slice = ALL) -> np.ndarray:
        """Return rows [stop - first, ..., columns] of a tensor of one dimension or more.

        Rows of a mapped file are views, as in `read`.
        """
        start = self.offset + first * self.row_bytes
        data = self.file.read(start, start + (stop - first) * self.row_bytes)
        rows = data.view(_DTYPES[self.dtype]).reshape(stop - first, *self.shape[1:])
        return rows[..., columns]


def copy_view(source: np.ndarray, target: np.ndarray) -> None:
    """Copy a view of a mapped tensor, often a transposed one, into an array of the same shape."""
    if source.ndim < 2:
        target[...] = source
        return
    # Copy columns that share a cache line together; otherwise each element would load a line.
    width = max(1, CACHE_LINE // (source.itemsize * math.prod(source.shape[2:])))
    for first in range(0, source.shape[1], width):
        target[:, first : first + width] = source[:, first : first + width]


def read_header(file: ModelFile) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raises SafetensorsError if the file is cut off, or its
    header is invalid.
    """
    size = file.size
    head = file.read(0, min(size, _FIRST_READ)).tobytes()
    length = struct.unpack("<Q", head[:8])[0] if size >= 8 else size
    if length > min(size - 8, _MAX_HEADER):
        raise SafetensorsError(f"{file} is no safetensors file, or it is cut off")
    if 8 + length > len(head):
        head = file.read(0, 8 + length).tobytes()
    try:
        header = json.loads(head[8 : 8 + length])
        tensors = dict(_tensors(file, header, start=8 + length))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{file} has a damaged header: {error}") from None
    for name, tensor in tensors.items():
        begin, end = header[name]["data_offsets"]
        known = _DTYPES.get(tensor.dtype)
        wrong = known is not None and end - begin != math.prod(tensor.shape) * known.itemsize
        if wrong or begin > end:
            raise SafetensorsError(f"{file}: {name} has other bytes than its shape and dtype need")
        if 8 + length + end > size:
            raise SafetensorsError(f"{file} is cut off: {name} ends beyond its {size} bytes")
    return tensors


def _tensors(
    file: ModelFile, header: Mapping[str, Mapping[str, object]], start: int
) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
            raise ValueError(f"{name} has no list of sizes, or not two offsets")
        yield name, StoredTensor(file, str(entry["dtype"]), tuple(shape), start + offsets[0])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def read_folder(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name.

    As in transformers, a file of the whole model comes before an index; without both, all files
    are read.

    Raises:
      SafetensorsError: there are no files, the index names missing ones, or files are damaged; with
        a problem for each.
      ConfigError: an object store or the hub cannot be read.
    """
    weight_map: Mapping[str, object] = {}
    try:
        names, files = [WEIGHTS], folder.open([WEIGHTS])
    except FileNotFoundError:
        weight_map = _read_index(folder)
        names = sorted({*map(str, weight_map.values())}) or _weight_files(folder)
        try:
            files = folder.open(names)
        except FileNotFoundError as error:
            raise SafetensorsError(f"{folder} lacks {error}, which its index names") from None
    holders: dict[str, dict[str, StoredTensor]] = {}  # where each tensor is, by file
    problems: list[str] = []
    for name, file in zip(names, files, strict=True):
        try:
            for tensor, stored in read_header(file).items():
                holders.setdefault(tensor, {})[name] = stored
        except SafetensorsError as error:
            problems += error.problems
    tensors: dict[str, StoredTensor] = {}
    unclear: dict[tuple[str, ...], list[str]] = {}  # tensors, by the files that hold them
    for tensor, held in sorted(holders.items()):
        # If several files have a tensor, the index says which counts.
        counts = weight_map.get(tensor) if len(held) > 1 else next(iter(held))
        if counts in held:
            tensors[tensor] = held[counts]
        else:
            unclear.setdefault(tuple(held), []).append(tensor)
    problems += [
        f"{folder}: {_some(both)} in each of {' and '.join(held)}" for held, both in unclear.items()
    ]
    if problems:
        raise SafetensorsError(*problems)
    if lost := sorted({*weight_map} - tensors.keys()):
        raise SafetensorsError(f"{folder}: {_some(lost)} of the index are in no file")
    return tensors


def _read_index(folder: ModelFolder) -> Mapping[str, object]:
    """Return the file of each tensor by the index, empty without one; raises SafetensorsError if it
    is damaged, or names files outside the folder.
    """
    try:
        weight_map: Mapping[str, object] = json.loads(folder.read(INDEX))["weight_map"]
        names = sorted({*map(str, weight_map.values())})
    except FileNotFoundError:
        return {}
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{folder}/{INDEX} is damaged: {error!r:.200}") from None
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise SafetensorsError(f"{folder}/{INDEX} names {name:.80}, which is not in the folder")
    return weight_map


def _weight_files(folder: ModelFolder) -> list[str]:
    """Return the names of the weight files of a folder without an index."""
    names = folder.names()
    if files := [name for name in names if name.endswith(".safetensors")]:
        return files
    old = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    hint = ""
    if old:
        hint = (
            f"; {old[0]} is of PyTorch: load it with transformers and call "
            "save_pretrained(safe_serialization=True)"
        )
    raise SafetensorsError(f"{folder} has no *.safetensors files{hint}")


def header(
    tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> tuple[bytes, int]:
    """Return the bytes that precede the tensors' bytes, and how many bytes tensors have.

    Tensors are (name, dtype, shape) in their order in the file; readers show the metadata.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return struct.pack("<Q", len(text)) + text, end


def write_file(file: Path, tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> np.memmap:
    """Write a file's header, and return its data as bytes to fill in, one tensor after another.

    Tensors are as for `header`. Raises OSError if the file cannot be written, or the disk has no
    room for it.
    """
    start, size = header(tensors)
    with file.open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
        stream.flush()
        if hasattr(os, "posix_fallocate"):
            # Writing to a mapped file on a full disk would kill the process with a signal.
            os.posix_fallocate(stream.fileno(), 0, len(start) + size)
        os.fsync(stream.fileno())
    return np.memmap(file, np.uint8, "r+", len(start), (size,))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
