"""Read rows of Hugging Face data sets: text, token ids or conversations in one column.

They are opened by `maxpipe.data.dataset_tables`, which says what `data.path` may be.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.dataset_tables import Table, open_tables
from maxpipe.data.documents import BadDocument
from maxpipe.data.sources.chat import Conversations, line_of, template_of
from maxpipe.data.sources.parquet import COLUMNS, document_field

_PATH = "data.path"
_MESSAGES, _TOOLS = "messages", "tools"


class Tables:
    """The rows of some data sets, one data set after the other; picklable.

    Args:
      tables: the data sets, at least one.
      columns: for each table, the columns to read.
    """

    def __init__(self, tables: Sequence[Table], columns: Sequence[Sequence[str]]):
        self._names = [table.name for table in tables]
        # A saved data set may have a format, such as torch; without one, values are Python objects.
        self._tables = [
            table.rows.with_format(None).select_columns(list(names))
            for table, names in zip(tables, columns, strict=True)
        ]
        self._firsts = np.array([0, *accumulate(len(table) for table in self._tables)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def row(self, index: int) -> dict[str, object]:
        """Return a row's values by column; raise BadDocument if a text in it is not UTF-8."""
        table, row = self._locate(index)
        try:
            values: dict[str, object] = self._tables[table][row]
        except UnicodeDecodeError as error:
            raise BadDocument(Problem(_PATH, f"{self.place(index)} is not UTF-8")) from error
        return values

    def place(self, index: int) -> str:
        """Return the data set and the number of its row, from 0, for messages."""
        table, row = self._locate(index)
        return f"{self._names[table]}: row {row}"

    def _locate(self, index: int) -> tuple[int, int]:
        table = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return table, int(index - self._firsts[table])


class TableDocuments:
    """The documents in one column of some tables."""

    def __init__(self, tables: Tables):
        self._tables = tables

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, index: int) -> str | np.ndarray:
        """Return text, or token ids; a row without a value is an empty text.

        Raises:
          BadDocument: there is a null among the token ids.
        """
        (value,) = self._tables.row(index).values()
        if isinstance(value, list) and None in value:
            message = f"{self._tables.place(index)}: a null among the token ids"
            raise BadDocument(Problem(_PATH, message))
        return np.asarray(value, np.int64) if isinstance(value, list) else str(value or "")


class TableLines:
    """The conversations of some tables as lines of JSON, see `maxpipe.data.sources.chat.Lines`."""

    def __init__(self, tables: Tables, column: str):
        self._tables = tables
        self._column = column

    def __len__(self) -> int:
        return len(self._tables)

    def line(self, index: int) -> bytes:
        """Return an object with `messages`, and `tools` if the table has them."""
        row = self._tables.row(index)
        row[_MESSAGES] = row.pop(self._column)
        return line_of(self.place(index), row)

    def place(self, index: int) -> str:
        """Return the data set and the number of its row, from 0, for messages."""
        return self._tables.place(index)


def datasets(config: DataConfig) -> TableDocuments:
    """Return the rows of the data sets of `data.path`, entries in sorted order, the hub's last.

    Raises:
      ConfigError: a data set is missing, cannot be read, or has no column of text or token ids;
        or the library is not installed.
    """
    tables = open_tables(config.path, config.cache_dir, config.cache_limit)
    names = [config.column] if config.column else COLUMNS
    # The schema gives a data set's column before any row is read.
    columns = [
        document_field(name, rows.features.arrow_schema, names).name for name, rows in tables
    ]
    return TableDocuments(Tables(tables, [[column] for column in columns]))


def datasets_chat(config: DataConfig) -> Conversations:
    """Return the conversations in the data sets of `data.path`, in the order of `datasets`.

    Raises:
      ConfigError: see `datasets`; or there is no chat template, or the tokenizer cannot encode
        conversations.
    """
    template = template_of(config)
    tables = open_tables(config.path, config.cache_dir, config.cache_limit)
    column = config.column or _MESSAGES
    for name, rows in tables:
        if column not in rows.column_names:
            message = f'{name} has the columns {", ".join(rows.column_names)}; it needs "{column}"'
            raise ConfigError(Problem(_PATH, message))
    columns = [
        [column, _TOOLS] if _TOOLS in rows.column_names and column != _TOOLS else [column]
        for _, rows in tables
    ]
    return Conversations(TableLines(Tables(tables, columns), column), template)
