"""Read parquet files: a document per row, in column "text" (strings) or "tokens" (lists of ids).

Reading a row of a parquet file means reading the thousands of rows around it. Each file is
therefore rewritten once as an uncompressed Arrow file of that column alone, which is memory-mapped;
see `data.cache_dir`. With `data.stream` row groups are read as they are needed (`row_groups`).
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Blocks, Concatenation, bad_document
from maxpipe.data.files import files_of, path_error, stored_files
from maxpipe.data.row_groups import RowGroupFile, footer, import_pyarrow, reading
from maxpipe.storage.local_files import RemoteFile, local_copy, version_of

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("text", "tokens")
SUFFIXES = SOURCES["parquet"].suffixes
_THREADS = 32  # that read footers


class Rows:
    """The rows of a table: an `ArrowFile`, `RowGroupFile` or data set; messages have its name."""

    def __init__(self, name: str, table: Any):
        self._name = name
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the values of a row; raises BadDocument if one is not UTF-8."""
        try:
            row: Mapping[str, Any] = self._table[index]
            return row
        except UnicodeDecodeError as error:
            raise bad_document(f"{self.place(index)} is not UTF-8") from error

    def place(self, index: int) -> str:
        """Return the table and the number of its row, from 0, for messages."""
        return f"{self._name}: row {index}"


class RowDocuments(Rows):
    """The documents in the only column of a table."""

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Return text, or token ids; a row without a value is an empty text."""
        (value,) = self.read(index).values()
        if not isinstance(value, list):
            return str(value or "")
        if None in value:
            raise bad_document(f"{self.place(index)}: a null among the token ids")
        return np.asarray(value, np.int64)


class ArrowFile:
    """The rows of an Arrow file."""

    def __init__(self, path: str):
        self._path = path

    def __len__(self) -> int:
        return _map_table(self._path).num_rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        (row,) = _map_table(self._path).slice(index, 1).to_pylist()
        return row


# Mappings are cached per process, outside the object, because they cannot be pickled for workers.
@lru_cache(maxsize=1024)
def _map_table(path: str) -> "pa.Table":
    pyarrow = import_pyarrow()
    return pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()


def _arrow_copy(path: str, field: "pa.Field", config: DataConfig) -> str:
    """Return the path of an Arrow file that has one column of a parquet file."""

    def write(out: BinaryIO) -> None:
        pyarrow = import_pyarrow()
        schema = pyarrow.schema([field])
        with pyarrow.ipc.new_file(out, schema) as writer:
            for batch in read_batches(path, [field.name]):
                column = batch.column(0).cast(field.type)
                writer.write_batch(pyarrow.record_batch([column], schema=schema))

    cache_dir, limit = config.cache_dir, config.cache_limit
    return local_copy(path, version_of(path), ".arrow", cache_dir, write, limit)


def read_batches(path: str, columns: Sequence[str]) -> "Iterator[pa.RecordBatch]":
    """Yield some columns of a parquet file; raises ConfigError if the file is damaged."""
    with reading(path), import_pyarrow().parquet.ParquetFile(path) as file:
        yield from file.iter_batches(columns=columns)


def schema_of(path: str) -> "pa.Schema":
    """Return the columns of a parquet file; raises ConfigError if it is none."""
    with reading(path):
        return import_pyarrow().parquet.read_schema(path)


def document_field(path: str, schema: "pa.Schema", columns: Sequence[str] = COLUMNS) -> "pa.Field":
    """Return name and type, without dictionary encoding, of the first of `columns` that exists;
    raises ConfigError if none exists, or if it holds neither text nor token ids.
    """
    pyarrow = import_pyarrow()
    types = pyarrow.types
    name = next((name for name in columns if name in schema.names), None)
    if name is None:
        raise lacks_column(path, schema.names, columns)
    stored = schema.field(name).type
    kind = stored.value_type if types.is_dictionary(stored) else stored
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if not (is_text or (is_list and types.is_integer(kind.value_type))):
        raise path_error(f"{path}: column {name!r} holds {stored}, not text or lists of token ids")
    return pyarrow.field(name, kind)


def lacks_column(path: str, there: Sequence[str], needed: Sequence[str]) -> ConfigError:
    """Return an error about columns of which one is needed."""
    names = " or ".join(f'"{name}"' for name in needed)
    return path_error(f"{path} has the columns {', '.join(there)}; it needs {names}")


@cache  # a start opens documents several times
def _row_group_file(file: RemoteFile, columns: Sequence[str], cache_dir: str) -> RowGroupFile:
    schema = footer(file, cache_dir).schema.to_arrow_schema()
    return RowGroupFile(file, document_field(file.name, schema, columns).name, cache_dir)


def streamed(
    files: Sequence[RemoteFile], cache_dir: str, columns: Sequence[str] = COLUMNS
) -> Concatenation:
    """Return the rows of files that are read as they are needed; errors are those of `parquet`."""
    open_one = partial(_row_group_file, columns=tuple(columns), cache_dir=cache_dir)
    with ThreadPoolExecutor(_THREADS) as pool:
        tables = [*pool.map(open_one, files)]
    rows = np.concatenate([table.rows for table in tables])
    mean_bytes = sum(table.bytes @ table.rows for table in tables) / max(rows.sum(), 1)
    parts = [RowDocuments(file.name, table) for file, table in zip(files, tables, strict=True)]
    return Concatenation(parts, Blocks(rows, mean_bytes))


def parquet(config: DataConfig) -> Concatenation:
    """Return the rows of the files of `data.path` (in a directory: *.parquet) in sorted order;
    raises ConfigError if one is not a parquet file or lacks the column.
    """
    if config.stream:
        return streamed(stored_files(config.path, SUFFIXES), config.cache_dir)
    parts = []
    for path in files_of(config, "parquet"):
        field = document_field(path, schema_of(path))
        parts.append(RowDocuments(path, ArrowFile(_arrow_copy(path, field, config))))
    return Concatenation(parts)
