"""Read records of JSON as typed values. A file of our own may be torn, old, or anyone's by now.

Imports no JAX.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Shape = TypeVar("Shape")


class Damaged(ValueError):
    """A record is missing, cannot be read, or has another shape."""


def read_record(path: Path, shape: type[Shape]) -> Shape:
    """Return the record in a file; raises `Damaged`. Arguments are those of `parse_record`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    return parse_record(text, shape)


def parse_record(text: str | bytes, shape: type[Shape]) -> Shape:
    """Return the record in a text of JSON; raises `Damaged` if it has another shape.

    The shape is a dataclass or named tuple, `dict`, `list` or `tuple` of something, or a plain
    type; `object` is anything.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"no JSON: {text[:100]!r}") from error
    return shaped(value, shape)


def shaped(value: object, shape: type[Shape]) -> Shape:
    """Return a value of JSON with the types of `shape`; raises `Damaged` if it has others."""
    try:
        result: Shape = _shaped(value, shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise Damaged(f"no {shape.__name__}: {str(value)[:100]}") from error
    return result


def _shaped(value: Any, shape: Any) -> Any:
    origin, arguments = get_origin(shape), get_args(shape)
    if shape in (object, Any):
        return value
    if origin in (Union, UnionType):
        for choice in arguments:
            with suppress(TypeError):
                return _shaped(value, choice)
    elif isinstance(value, dict) and origin in (dict, Mapping):  # keys of JSON are strings
        return {arguments[0](key): _shaped(inner, arguments[1]) for key, inner in value.items()}
    elif isinstance(value, dict) and (is_dataclass(shape) or hasattr(shape, "_fields")):
        kinds = _kinds(shape)
        return shape(**{name: _shaped(inner, kinds.get(name)) for name, inner in value.items()})
    elif isinstance(value, list) and origin in (list, tuple, Sequence):
        items = [_shaped(inner, arguments[0]) for inner in value]
        return tuple(items) if origin is tuple else items
    elif shape is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    elif type(value) is shape and shape is not float:
        return value
    raise TypeError(f"{value!r:.100} is no {shape}")


@cache
def _kinds(shape: type) -> dict[str, Any]:
    return get_type_hints(shape)
