"""Read parquet files a row group at a time, where they lie: for data larger than the disk.

A start reads footers only; those of files in a store are kept in `data.cache_dir`. Later a process
holds the row groups that it used last.
"""

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from maxpipe.config.imports import optional
from maxpipe.data.files import path_error
from maxpipe.storage.local_files import RemoteFile, cache_directory, local_file, write_atomically
from maxpipe.storage.object_store import is_remote, opened, patiently

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

HELD = 3 << 30  # most bytes of row groups that a process holds, unless two are larger

Read = TypeVar("Read")


class RowGroupFile:
    """The rows of a parquet file, of one column.

    Attributes:
      rows, bytes: rows of each row group, and about what its column takes in memory (text that
        repeats takes more), int64 [row groups].
    """

    def __init__(self, file: RemoteFile, column: str, cache_dir: str):
        self._file, self._column, self._cache_dir = file, column, cache_dir
        metadata = footer(file, cache_dir)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        leaves = [i for i, path in enumerate(paths) if path.split(".")[0] == column]
        chunks = [[group.column(i) for i in leaves] for group in groups]
        stored = [sum(chunk.total_uncompressed_size for chunk in each) for each in chunks]
        counts = [sum(chunk.num_values for chunk in each) for each in chunks]
        types = {metadata.schema.column(i).physical_type for i in leaves}
        width = 8 if "INT64" in types else 4  # bytes of a token id, of which a file stores bits
        self.rows = np.array([group.num_rows for group in groups], np.int64)
        self.bytes = np.maximum(stored, np.multiply(counts, width)).astype(np.int64)
        self._ends = np.cumsum(self.rows)

    def __len__(self) -> int:
        return int(self.rows.sum())

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        read = partial(_read_group, self._file, group, self._column, self._cache_dir)
        table = _HELD.get((self._file, self._column, group), int(self.bytes[group]), read)
        (row,) = table.slice(index - int(self._ends[group] - self.rows[group]), 1).to_pylist()
        return row


class _RowGroups:
    """The row groups that a process used last; threads that need the same one read it once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[object, tuple[int, Future[pa.Table]]] = OrderedDict()

    def get(self, key: object, estimate: int, read: "Callable[[], pa.Table]") -> "pa.Table":
        with self._lock:
            is_new = key not in self._held
            _, table = self._held.setdefault(key, (estimate, Future()))
            self._held.move_to_end(key)
            total = sum(size for size, _ in self._held.values()) if is_new else 0
            while total > HELD and len(self._held) > 2:
                total -= self._held.popitem(last=False)[1][0]
        if is_new:
            try:
                new = read()
                with self._lock:
                    self._held[key] = new.nbytes, table
                table.set_result(new)
            except BaseException as error:
                with self._lock:
                    self._held.pop(key, None)
                table.set_exception(error)
        return table.result()


# Of the process, outside the files, which are pickled for workers.
_HELD = _RowGroups()


def _read_group(file: RemoteFile, group: int, column: str, cache_dir: str) -> "pa.Table":
    metadata, parquet = footer(file, cache_dir), import_pyarrow().parquet

    def read(source: Any) -> "pa.Table":
        return parquet.ParquetFile(source, metadata=metadata).read_row_group(group, [column])

    return _reading(file, read)


@lru_cache(maxsize=64)
def footer(file: RemoteFile, cache_dir: str) -> "FileMetaData":
    """Return what the end of a parquet file says of it; raises ConfigError if it cannot be read."""
    parquet = import_pyarrow().parquet
    if not is_remote(file.name):
        return _reading(file, parquet.read_metadata)
    name = hashlib.sha256(f"{file.name}\0{file.etag}".encode()).hexdigest()[:24]
    path = cache_directory(cache_dir) / "footers" / f"{name}.parquet"
    with suppress(import_pyarrow().ArrowException, OSError):  # none there, or a damaged one
        return parquet.read_metadata(path)
    metadata = _reading(file, parquet.read_metadata)
    metadata.write_metadata_file(copy := io.BytesIO())
    with suppress(OSError):  # the next start reads it again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [copy.getvalue()])
    return metadata


def _reading(file: RemoteFile, read: Callable[[Any], Read]) -> Read:
    """Return what `read` makes of a file, after several attempts if it is in a store."""
    lasting = import_pyarrow().ArrowException
    with reading(file.name):
        if not is_remote(file.name):
            if local_file(file.name) != file:
                raise path_error(f"{file.name} has changed since the start; start again")
            return read(file.name)
        return patiently(lambda: read(opened(file.name, file.size)), file.name, lasting)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn pyarrow's errors into ConfigErrors that name the file."""
    try:
        yield
    except (import_pyarrow().ArrowException, OSError) as error:  # the latter for damaged pages, too
        raise path_error(f"{path} cannot be read as parquet: {error}") from error


def import_pyarrow() -> ModuleType:
    with optional("pyarrow", "data", "data.source"):
        import pyarrow.parquet
    return pyarrow
