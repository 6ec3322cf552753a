"""Read parquet files: a document per row, in column "text" (strings) or "tokens" (lists of ids).

Reading a row of a parquet file means reading the thousands of rows around it. Each file is
therefore rewritten once as an uncompressed Arrow file of that column alone, which is memory-mapped;
see `data.cache_dir`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from maxpipe.config.imports import optional
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Parts, bad_document
from maxpipe.data.files import files_of, path_error, require_content
from maxpipe.storage.local_files import local_copy, version_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

COLUMNS = ("text", "tokens")


class ArrowRows:
    """The rows of Arrow files that have one column each; `originals` are the files that the user
    knows, of which `paths` are copies.
    """

    def __init__(self, paths: list[str], originals: Sequence[str]):
        self._paths = paths
        self._originals = originals
        self._parts = Parts(len(_map_column(path)) for path in paths)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Return text, or token ids; a row without a value is an empty text."""
        file, row = self._parts.locate(index)
        try:
            value = _map_column(self._paths[file])[row].as_py()
        except UnicodeDecodeError as error:
            raise bad_document(f"{self._originals[file]}: row {row} is not UTF-8") from error
        return np.asarray(value) if isinstance(value, list) else value or ""


# Mappings are cached per process, outside the object, because they cannot be pickled for workers.
@lru_cache(maxsize=1024)
def _map_column(path: str) -> "pa.ChunkedArray":
    """Return the column of an Arrow file."""
    pyarrow = _pyarrow()
    return pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all().column(0)


def _as_arrow(path: str, config: DataConfig) -> str:
    """Return the path of the Arrow file made from a parquet file."""
    pyarrow = _pyarrow()

    def write(out: BinaryIO) -> None:
        with _reading(path):
            file = pyarrow.parquet.ParquetFile(path)
        field = document_field(path, file.schema_arrow)
        schema = pyarrow.schema([field])
        with pyarrow.ipc.new_file(out, schema) as writer:
            for column in _columns(path, file, field):
                writer.write_batch(pyarrow.record_batch([column], schema=schema))

    cache_dir, limit = config.cache_dir, config.cache_limit
    return local_copy(path, version_of(path), ".arrow", cache_dir, write, limit)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn pyarrow's errors into ConfigErrors that name the file."""
    try:
        yield
    except _pyarrow().ArrowException as error:
        raise path_error(f"{path} is no parquet file: {error}") from error
    except OSError as error:  # raised for damaged pages, too
        raise path_error(f"{path} cannot be read: {error}") from error


def document_field(path: str, schema: "pa.Schema", columns: Sequence[str] = COLUMNS) -> "pa.Field":
    """Return name and type, without dictionary encoding, of the first of `columns` that exists.

    `path` names in messages what has the columns. Raises ConfigError if none exists, or if it holds
    neither text nor token ids.
    """
    pyarrow = _pyarrow()
    types = pyarrow.types
    for name in columns:
        if name in schema.names:
            stored = schema.field(name).type
            kind = stored.value_type if types.is_dictionary(stored) else stored
            are_lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
            is_list = any(check(kind) for check in are_lists)
            is_text = types.is_string(kind) or types.is_large_string(kind)
            if is_text or (is_list and types.is_integer(kind.value_type)):
                return pyarrow.field(name, kind)
            expected = "text (strings) or token ids (lists of integers)"
            raise path_error(f"{path}: column {name!r} holds {stored}, not {expected}")
    needed = " or ".join(f'"{name}"' for name in columns)
    raise path_error(f"{path} has the columns {', '.join(schema.names)}; it needs {needed}")


def _columns(path: str, file: "pq.ParquetFile", field: "pa.Field") -> "Iterator[pa.Array]":
    """Yield the documents' column of each batch of rows; raises ConfigError if the file is damaged,
    or a list of token ids has a null in it.
    """
    first = 0
    with _reading(path), file:
        for batch in file.iter_batches(columns=[field.name]):
            column = batch.column(0).cast(field.type)
            if _pyarrow().types.is_nested(field.type) and column.flatten().null_count:
                rows = enumerate(column.to_pylist(), first)
                row = next(row for row, ids in rows if ids and None in ids)
                raise path_error(f"{path}: row {row}: a null among the token ids")
            first += len(column)
            yield column


def read_rows(path: str, fields: Sequence[str], needed: str) -> Iterator[dict[str, object]]:
    """Yield the rows of a parquet file as Python values, of those `fields` that exist; raises
    ConfigError if the file is damaged, lacks the column `needed` or has a text that is not UTF-8.
    """
    with _reading(path):
        file = _pyarrow().parquet.ParquetFile(path)
    names = file.schema_arrow.names
    if needed not in names:
        raise path_error(f'{path} has the columns {", ".join(names)}; it needs "{needed}"')
    first = 0
    with _reading(path), file:
        for batch in file.iter_batches(columns=[name for name in fields if name in names]):
            yield from _as_python(path, batch, first)
            first += len(batch)


def _as_python(path: str, batch: "pa.RecordBatch", first: int) -> list[dict[str, object]]:
    """Return rows as Python values; raise ConfigError naming one that is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            raise path_error(f"{path}: row {first} is not UTF-8") from error
    return [
        row for i in range(len(batch)) for row in _as_python(path, batch.slice(i, 1), first + i)
    ]


def _pyarrow() -> ModuleType:
    with optional("pyarrow", "data", "data.source"):
        import pyarrow.parquet
    return pyarrow


def parquet(config: DataConfig) -> ArrowRows:
    """Return the rows of the files of `data.path` (in a directory: *.parquet) in sorted order;
    raises ConfigError if one is not a parquet file, lacks the column or has a null in its ids.
    """
    files = require_content(files_of(config, "parquet"))
    return ArrowRows([_as_arrow(path, config) for path in files], originals=files)
