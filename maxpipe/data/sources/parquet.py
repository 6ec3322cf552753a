"""Parquet files: one document per row, from the column "text" (strings) or "tokens" (lists of token ids).

A row of a parquet file cannot be read without the thousands around it, so each file is rewritten
once as an uncompressed Arrow file of that column alone, which is memory-mapped; see
`data.cache_dir`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import Spans, find_files, local_copy, require_content, version_of

COLUMNS = ("text", "tokens")


class ArrowRows:
    """The rows of some Arrow files of one column.

    Args:
      paths: the files.
    """

    def __init__(self, paths: list[str]):
        self._paths = paths
        numbers = (np.arange(len(_map_column(path))) for path in paths)
        self._rows = Spans([np.stack([rows, rows + 1], axis=1) for rows in numbers])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Text, or token ids; a row without a value is an empty text."""
        file, row, _ = self._rows.locate(index)
        value = _map_column(self._paths[file])[row].as_py()
        return np.asarray(value) if isinstance(value, list) else value or ""


# Held per process, outside the object: what is mapped cannot be pickled for worker processes.
@lru_cache(maxsize=1024)
def _map_column(path: str) -> Any:
    """The column of an Arrow file as a `pyarrow.ChunkedArray`."""
    pyarrow = _pyarrow()
    return pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all().column(0)


def _as_arrow(path: str, cache_dir: str) -> str:
    """Path of the Arrow file for a parquet file."""
    pyarrow = _pyarrow()

    def write(target: Path) -> None:
        with _reading(path):
            file = pyarrow.parquet.ParquetFile(path)
        field = _field(path, file.schema_arrow)
        schema = pyarrow.schema([field])
        with pyarrow.OSFile(str(target), "wb") as out, pyarrow.ipc.new_file(out, schema) as writer:
            for column in _columns(path, file, field):
                writer.write_batch(pyarrow.record_batch([column], schema=schema))

    return local_copy(path, version_of(path), ".arrow", cache_dir, write)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except _pyarrow().ArrowException as error:
        raise ConfigError(Problem("data.path", f"{path} is no parquet file: {error}")) from error
    except OSError as error:  # also of damaged pages
        raise ConfigError(Problem("data.path", f"{path} cannot be read: {error}")) from error


def _field(path: str, schema: Any) -> Any:
    """Name and type, no longer encoded by a dictionary, of the column that holds documents."""
    pyarrow = _pyarrow()
    types = pyarrow.types
    for name in COLUMNS:
        if name in schema.names:
            stored = schema.field(name).type
            kind = stored.value_type if types.is_dictionary(stored) else stored
            is_list = (
                types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            )
            if (
                types.is_string(kind)
                or types.is_large_string(kind)
                or (is_list and types.is_integer(kind.value_type))
            ):
                return pyarrow.field(name, kind)
            message = f"{path}: column {name!r} holds {stored}, not text (strings) or token ids (lists of integers)"
            raise ConfigError(Problem("data.path", message))
    message = f'{path} has the columns {", ".join(schema.names)}; it needs "text" or "tokens"'
    raise ConfigError(Problem("data.path", message))


def _columns(path: str, file: Any, field: Any) -> Iterator[Any]:
    """The column of each batch of rows.

    Raises:
      ConfigError: the file is damaged, or a list of token ids has a null in it.
    """
    first = 0
    with _reading(path), file:
        for batch in file.iter_batches(columns=[field.name]):
            column = batch.column(0).cast(field.type)
            if _pyarrow().types.is_nested(field.type) and column.flatten().null_count:
                row = first + next(
                    i for i, ids in enumerate(column.to_pylist()) if ids and None in ids
                )
                raise ConfigError(
                    Problem("data.path", f"{path}: row {row}: a null among the token ids")
                )
            first += len(column)
            yield column


def _pyarrow() -> Any:
    with optional("pyarrow", "data", "data.source"):
        import pyarrow.parquet
    return pyarrow


def build(config: DataConfig) -> ArrowRows:
    """The rows of the files of `data.path` (in a directory: *.parquet), files in sorted order.

    Raises:
      ConfigError: there is no file, one is no parquet file, has no such column or a null among its
        token ids, or pyarrow is not installed.
    """
    files = require_content(find_files(config.path, (".parquet",), config.cache_dir))
    return ArrowRows([_as_arrow(path, config.cache_dir) for path in files])
