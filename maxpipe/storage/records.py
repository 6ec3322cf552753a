"""Read small records of JSON whose writer may be another host, an earlier process or anyone.

Imports no JAX.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import NoReturn, TypeVar, get_args, get_origin, get_type_hints

_MAX_BYTES = 10_000_000
_MAX_NUMBER = 2**53

Shape = TypeVar("Shape")


def read_record(path: Path, shape: type[Shape]) -> Shape:
    """Return the record in a file; raises as `parse_record`, and OSError if it cannot be read."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")  # reading a pipe would wait for a writer
    with path.open("rb") as file:
        return parse_record(file.read(_MAX_BYTES), shape)


def parse_record(text: str | bytes, shape: type[Shape]) -> Shape:
    """Return the record in a text of JSON as a dataclass whose fields have the declared types.

    Raises:
      ValueError: it is damaged: no JSON, a missing or unknown field, a value of another type, or a
        number of more than 53 bits.
    """
    try:
        value = json.loads(text, parse_int=_bounded, parse_constant=_refuse)
        record = _shaped(value, shape)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no {shape.__name__}: {text[:100]!r}") from error
    assert isinstance(record, shape)
    return record


def _shaped(value: object, shape: object) -> object:
    """Return a value of JSON as one of a type; raises ValueError, TypeError or the like."""
    kind, arguments = get_origin(shape), get_args(shape)
    if isinstance(shape, type) and is_dataclass(shape) and isinstance(value, dict):
        kinds = get_type_hints(shape)
        return shape(**{name: _shaped(inner, kinds[name]) for name, inner in value.items()})
    if kind is UnionType:  # of a type and None
        return None if value is None else _shaped(value, arguments[0])
    if kind is Mapping and isinstance(value, dict):  # keys of JSON are strings
        return {arguments[0](key): _shaped(inner, arguments[1]) for key, inner in value.items()}
    if kind is Sequence and isinstance(value, list):
        return [_shaped(inner, arguments[0]) for inner in value]
    if type(value) is not shape or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError("a value of another type")
    return value


def _bounded(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > _MAX_NUMBER:
        raise ValueError("a number of more than 53 bits")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
