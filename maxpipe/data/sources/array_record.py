"""ArrayRecord files: one `tf.train.Example` per record with the document in its feature "text", as TFDS writes them."""

from typing import Any

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import find_files, require_content
from maxpipe.data.tf_example import bytes_feature


class ArrayRecords:
    """The records of some files, read one at a time by their index.

    Args:
      paths: non-empty files.
    """

    def __init__(self, paths: list[str]):
        self._paths = paths
        self._source = _open(paths)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> str:
        """Raises ConfigError, naming file and record, if the record is damaged or holds no UTF-8 text."""
        try:
            (record,) = self._source.__getitems__([index])
            return bytes_feature(record, "text").decode("utf-8")
        except (ValueError, KeyError, RuntimeError) as error:
            message = f'{self._locate(index)} is no tf.train.Example with a feature "text" in UTF-8 ({error})'
            raise ConfigError(Problem("data.path", message)) from error

    def _locate(self, index: int) -> str:
        for path in self._paths:
            size = len(_open([path]))
            if index < size:
                return f"{path}: record {index}"
            index -= size
        raise AssertionError(index)


def _open(paths: list[str]) -> Any:
    """An `array_record.python.array_record_data_source.ArrayRecordDataSource`, which opens files when it reads them."""
    with optional("array_record", "data", "data.source"):
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    try:
        return ArrayRecordDataSource(paths)
    except (ValueError, RuntimeError) as error:
        if len(paths) > 1:  # the error does not say which
            for path in paths:
                _open([path])
        raise ConfigError(
            Problem("data.path", f"{', '.join(paths)} cannot be read as ArrayRecord: {error}")
        ) from error


def build(config: DataConfig) -> ArrayRecords:
    """The records of the files of `data.path` (in a directory: *.array_record, *.arrayrecord), files in sorted order.

    Raises:
      ConfigError: there is no file, one is no ArrayRecord file, or array_record is not installed.
    """
    return ArrayRecords(
        require_content(
            find_files(config.path, (".array_record", ".arrayrecord"), config.cache_dir)
        )
    )
