"""ArrayRecord files: one `tf.train.Example` per record with the document in its feature "text", as TFDS writes them."""

from typing import Any

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import find_files, require_content
from maxpipe.data.optional import optional
from maxpipe.data.sources import SOURCES
from maxpipe.data.tf_example import bytes_feature


class ArrayRecords:
    """The records of some files, read one at a time by their index.

    Args:
      source: `array_record.python.array_record_data_source.ArrayRecordDataSource`.
    """

    def __init__(self, source: Any):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> str:
        """Raises ConfigError if the record holds no UTF-8 text."""
        (record,) = self._source.__getitems__([index])
        try:
            return bytes_feature(record, "text").decode("utf-8")
        except (ValueError, KeyError) as error:
            message = f'record {index} is no tf.train.Example with a feature "text" in UTF-8 ({error})'
            raise ConfigError(Problem("data.path", message)) from error


@SOURCES.register()
def build(config: DataConfig) -> ArrayRecords:
    """The records of the files of `data.path` (in a directory: *.array_record, *.arrayrecord), files in sorted order.

    Raises:
      ConfigError: there is no file, or one is no ArrayRecord file.
    """
    with optional("array_record", "data", "data.source"):
        from array_record.python.array_record_data_source import ArrayRecordDataSource
    files = require_content(find_files(config.path, (".array_record", ".arrayrecord"), config.cache_dir))
    try:
        return ArrayRecords(ArrayRecordDataSource(files))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(Problem("data.path", f"cannot be read as ArrayRecord: {error}")) from error
