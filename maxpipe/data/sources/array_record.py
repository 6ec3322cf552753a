"""Read ArrayRecord files: a `tf.train.Example` per record, its document in feature "text".

TFDS writes such files. They are read without TensorFlow and its definitions: an Example is
{1: Features}, Features is {1: entry}*, an entry {1: name, 2: Feature}, a Feature {1: BytesList},
and a BytesList {1: value}*.
"""

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from maxpipe.config.imports import optional
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Concatenation, bad_document
from maxpipe.data.files import files_of, path_error


def array_record(config: DataConfig) -> Concatenation:
    """Return the records of the files of `data.path` (in a directory: *.array_record and
    *.arrayrecord) in sorted order; raises ConfigError if one is not an ArrayRecord.
    """
    return Concatenation([ArrayRecords(file) for file in files_of(config, "array_record")])


class ArrayRecords:
    """The records of a non-empty file, read one at a time by their index."""

    def __init__(self, path: str):
        with optional("array_record", "data", "data.source"):
            from array_record.python.array_record_data_source import ArrayRecordDataSource
        self._path = path
        try:
            self._source = ArrayRecordDataSource([path])
        except (ValueError, RuntimeError) as error:
            raise path_error(f"{path} cannot be read as ArrayRecord: {error}") from error

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> str:
        """Return the text of a record; raises ConfigError if it is damaged, BadDocument if it holds
        no UTF-8 text.
        """
        try:
            (record,) = self._source.__getitems__([index])
            return bytes_feature(record, "text").decode("utf-8")
        except (ValueError, KeyError, DecodeError, RuntimeError) as error:
            place = f"{self._path}: record {index}"
            message = f'{place} is no tf.train.Example with a feature "text" in UTF-8 ({error})'
            kind = path_error if isinstance(error, RuntimeError) else bad_document
            raise kind(message) from error


def bytes_feature(example: bytes, name: str) -> bytes:
    """Return the first value of a feature that holds bytes; raises KeyError if there is none, and
    DecodeError if the bytes are not an Example.
    """
    for entry in _children(_joined(example, 1), 1):
        if name.encode() in _children(entry, 1):
            for value in _children(_joined(_joined(entry, 2), 1), 1):
                return value
    raise KeyError(name)


def _joined(message: bytes, number: int) -> bytes:
    """Return the fields with this number as one message, which is what several of them mean."""
    return b"".join(_children(message, number))


def _children(message: bytes, number: int) -> list[bytes]:
    """Return the contents of the length-delimited fields with this number."""
    fields = UnknownFieldSet(Empty.FromString(message))
    return [field.data for field in fields if (field.field_number, field.wire_type) == (number, 2)]
