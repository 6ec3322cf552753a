"""Read and write the safetensors format: a JSON header, then the bytes of all tensors.

The format is simple, and the library has no bfloat16 for NumPy. Files are read by byte ranges, so
that only what is asked for is read, from a disk or an object store.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import ml_dtypes
import numpy as np

from maxpipe.config.errors import ConfigError
from maxpipe.config.model_places import ModelFile, ModelFolder

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"  # name of a model's only file
CACHE_LINE = 64  # bytes
ALL = slice(None)
_MAX_HEADER = 100 << 20  # the library's own bound
_MOST_PROBLEMS = 20  # that are reported
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
    def row_bytes(self) -> int:  # a row is one index of the first dimension
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
        """Return rows [stop - first, ..., columns], views of a mapped file."""
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
    """Return the tensors of a file by name; raises SafetensorsError if it is damaged or cut off."""
    try:
        head = file.read(0, min(file.size, _FIRST_READ)).tobytes()
        start = 8 + struct.unpack("<Q", head[:8])[0]
        if start > min(file.size, _MAX_HEADER):
            raise ValueError("no header")
        if start > len(head):
            head = file.read(0, start).tobytes()
        tensors = {}
        for name, entry in json.loads(head[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(file, str(entry["dtype"]), tuple(entry["shape"]), start + begin)
            has_its_bytes = tensor.dtype not in _DTYPES or end - begin == tensor.num_bytes
            if not has_its_bytes or begin < 0 or start + end > file.size:
                raise ValueError(f"{name} has other bytes than the file")
            tensors[name] = tensor
        return tensors
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{file} is damaged or cut off: {error!s:.200}") from None


def read_folder(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Return the tensors of a model's folder by name.

    As in transformers, a file of the whole model comes before an index; without both, all files
    are read. Raises SafetensorsError, with all damaged files, if there are no files, or tensors or
    files of the index are missing; ConfigError if an object store or the hub cannot be read.
    """
    weight_map: Mapping[str, str] = {}
    try:
        names, files = [WEIGHTS], folder.open([WEIGHTS])
    except FileNotFoundError:
        weight_map = _read_index(folder)
        names = sorted({*weight_map.values()}) or _weight_files(folder)
        try:
            files = folder.open(names)
        except FileNotFoundError as error:
            raise SafetensorsError(f"{folder} lacks {error}, which its index names") from None
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, file in zip(names, files, strict=True):
        try:
            for tensor, stored in read_header(file).items():
                # If several files have a tensor, the index says which counts.
                if tensor not in tensors or weight_map.get(tensor) == name:
                    tensors[tensor] = stored
                elif tensor not in weight_map:
                    problems.append(f"{folder}: {tensor} is in {tensors[tensor].file} and {file}")
        except SafetensorsError as error:
            problems += error.args
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost and not problems:
        problems.append(f"{folder}: {len(lost)} tensors of the index are in no file: {lost[0]}")
    if problems:
        raise SafetensorsError(*problems[:_MOST_PROBLEMS])
    return tensors


def _read_index(folder: ModelFolder) -> Mapping[str, str]:
    """Return the file of each tensor by the index, empty without one."""
    try:
        weight_map = json.loads(folder.read(INDEX))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except FileNotFoundError:
        return {}
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f"{folder}/{INDEX} is damaged: {error!s:.200}") from None


def _weight_files(folder: ModelFolder) -> list[str]:
    """Return the names of the weight files of a folder without an index."""
    names = folder.names()
    if files := [name for name in names if name.endswith(".safetensors")]:
        return files
    hint = ""
    if old := [name for name in names if name.endswith(".bin")]:
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
    """Write a file's header, for tensors as there, and return its data as bytes to fill in, one
    tensor after another; raises OSError if it cannot be written, or the disk has no room for it.
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
