"""Reading `tf.train.Example` without TensorFlow: as much of protocol buffers' wire format as that takes.

An Example is {1: Features}, Features is {1: entry}*, an entry {1: name, 2: Feature}, a Feature {1:
BytesList}, and a BytesList {1: value}*.
"""

from collections.abc import Iterator

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5


def bytes_feature(example: bytes, name: str) -> bytes:
    """The first value of a feature that holds bytes.

    Raises:
      KeyError: there is no such feature.
      ValueError: the bytes are no Example.
    """
    for features in _children(example, 1):
        for entry in _children(features, 1):
            if name.encode() in _children(entry, 1):
                for feature in _children(entry, 2):
                    for values in _children(feature, 1):
                        for value in _children(values, 1):
                            return value
    raise KeyError(name)


def _children(message: bytes, number: int) -> list[bytes]:
    """The contents of the length-delimited fields with this number."""
    return [content for field, content in _fields(message) if field == number]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field; others are passed over."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind, length = tag & 7, 0
        if kind == VARINT:
            _, at = _varint(message, at)
        elif kind == DELIMITED:
            length, at = _varint(message, at)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(message):
            raise ValueError("it is cut short")
        if kind == DELIMITED:
            yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, position after it)"""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("it is cut short")
