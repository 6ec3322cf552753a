"""Convert the text of a YAML scalar to the value of a key by the key's type, not by YAML's guess.

So `run_name: 007` and `cache_dir: off` stay strings, and numbers may be written 1e3, 4k or 2Mi.
"""

import difflib
import math
import operator
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

from maxpipe.config.imports import OWN_VARIANTS
from maxpipe.config.options import Option
from maxpipe.config.sections.training import MixtureEntry


@dataclass(frozen=True)
class Scalar:
    """A YAML scalar as written; `quoted` tells the string 'null' from the null."""

    text: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.text.lower() in ("", "~", "null")


Raw: TypeAlias = "Scalar | list[Raw] | dict[str, Raw]"

AUTO = [-1]  # value of a list that is written as the word auto

_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?)(k|M|Ki|Mi)?")
_SUFFIXES = {None: 1, "k": 10**3, "M": 10**6, "Ki": 2**10, "Mi": 2**20}
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_EXAMPLES: Mapping[object, str] = {
    "model.layer_pattern": "[local, global]",
    "mesh.elastic.axes": "[data, fsdp]",
    list[MixtureEntry]: "[{source: jsonl, path: a.jsonl, weight: 0.7}, "
    "{source: text, path: b.txt, weight: 0.3}]",
    list[list[int]]: "[[0, 16], [1000, 32]]",
    list[list[int | float]]: "[[1000, 0.5, 0.5]]",
    list[str]: "[data, tokenizer]",
    list[float]: "[1.0, 1.5]",
    list[int]: "[10, 12]",
}


def convert(option: Option, raw: Raw) -> object:
    """Return the value of `raw` in the type of the option, not yet checked against its bounds.

    Raises:
      ValueError: it has another type; the message says which type is expected, but not the key.
    """
    if isinstance(raw, dict):
        raise ValueError("takes a value, not a section of further keys")
    is_list = option.type not in _READERS
    if isinstance(raw, Scalar):
        if raw.is_null and option.type is not str:
            raise ValueError("has no value")
        if option.bounds.zero and raw.text == option.bounds.zero:
            return 0
        if is_list and option.bounds.derived and raw.text == "auto":
            return AUTO
        if option.type == list[str]:
            raw = [raw]
    if not is_list:
        return _READERS[option.type](raw)
    return _list(option, option.type, raw)


def _list(option: Option, kind: Any, raw: Raw) -> object:
    if typing.get_origin(kind) is not list:
        return _READERS.get(kind, _plain)(raw)
    if not isinstance(raw, list):
        raise ValueError(f"expected a list such as {example(option)}, got {_show(raw)}")
    (item_kind,) = typing.get_args(kind)
    return [_list(option, item_kind, item) for item in raw]


def check_type(option: Option, value: object) -> None:
    """Raise ValueError unless a Python value has the option's type; an int is a legal float."""
    if not _is(value, option.type):
        expected = _NAMES.get(option.type) or f"a list such as {example(option)}"
        raise ValueError(f"expected {expected}, got {value!r}")


def _is(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
        return isinstance(value, list) and all(_is(item, kind) for item in value)
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    kinds: dict[Any, Any] = {float: (int, float), MixtureEntry: dict}
    return isinstance(value, kinds.get(kind, kind))


def check_bounds(option: Option, value: Any) -> None:
    """Raise ValueError, with the legal values, if a value of the right type breaks the bounds."""
    bounds, choices = option.bounds, option.choices
    for item in value if isinstance(value, list) else [value]:
        if choices and item not in choices:
            own = f" ({OWN_VARIANTS})" if bounds.variants is not None and not bounds.also else ""
            legal = f"{', '.join(choices)}{own}{nearest(str(item), choices)}"
            raise ValueError(f"{item!r} is not one of {legal}")
    if bounds.pattern and not re.fullmatch(bounds.pattern.encode(), os.fsencode(value), re.DOTALL):
        raise ValueError(f"{value!r} is not {bounds.form}")
    if bounds.derived and value == -1:
        return
    limits = (
        ("at least", bounds.minimum, operator.ge),
        ("greater than", bounds.above, operator.gt),
        ("at most", bounds.maximum, operator.le),
    )
    broken = [f"{words} {b}" for words, b, holds in limits if b is not None and not holds(value, b)]
    if broken:
        derived = ", or -1 to derive it" if bounds.derived else ""
        raise ValueError(f"must be {' and '.join(broken)}{derived}; got {value}")


def closest(value: str, choices: Sequence[str]) -> str | None:
    """Return the choice that is most like `value`, or None if no choice is like it."""
    return next(iter(difflib.get_close_matches(value.lower(), choices, n=1)), None)


def nearest(value: str, choices: Sequence[str]) -> str:
    """Return `; did you mean X?` with the choice most like `value`, or "" if none is like it."""
    choice = closest(value, choices)
    return f"; did you mean {choice}?" if choice else ""


def is_finite(value: float) -> bool:
    """Return whether a float can hold a number: not NaN, infinite, or an integer too large."""
    return abs(value) <= sys.float_info.max


def as_written(value: object) -> str:
    """Return a value as it is written after `key=`: truth values as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_of(changes: Mapping[str, object]) -> str:
    """Return changes as words of a command line."""
    return " ".join(f"{key}={as_written(value)}" for key, value in changes.items())


def _show(raw: Raw) -> str:
    if isinstance(raw, Scalar):
        return repr(raw.text)
    return "a list" if isinstance(raw, list) else "a section"


def example(option: Option) -> str:
    """Return a legal value of an option that takes a list, as it is written in YAML."""
    return _EXAMPLES.get(option.key) or _EXAMPLES.get(option.type, "[[embed, [fsdp]]]")


def number(text: str) -> Decimal:
    """Return the exact value of a number, written with underscores or a suffix k, M, Ki or Mi;
    raises ValueError if the text is not a finite number.
    """
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        raise ValueError(text)
    return Decimal(match[1].replace("_", "")) * _SUFFIXES[match[2]]


def _string(raw: Raw) -> str:
    if not isinstance(raw, Scalar) or (raw.is_null and raw.text):
        raise ValueError(f"expected a string (quote a word such as null), got {_show(raw)}")
    if "\0" in raw.text:
        raise ValueError("holds a NUL character, which no path or name can")
    return raw.text


def _bool(raw: Raw) -> bool:
    value = _BOOLS.get(raw.text.strip().lower()) if isinstance(raw, Scalar) else None
    if value is None:
        raise ValueError(f"expected true or false, got {_show(raw)}")
    return value


def _decimal(raw: Raw) -> Decimal:
    with suppress(ValueError):
        if isinstance(raw, Scalar):
            return number(raw.text)
    return Decimal("nan")


def _integer(raw: Raw) -> int:
    value = _decimal(raw)
    if value.is_nan() or value.adjusted() > 18 or value != int(value):
        raise ValueError(f"expected a whole number such as 8, 1e3, 4k or 2Ki, got {_show(raw)}")
    return int(value)


def _float(raw: Raw) -> float:
    value = float(_decimal(raw))
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number such as 3e-4, got {_show(raw)}")
    return value


def _number(raw: Raw) -> int | float:
    value = _float(raw)
    return int(value) if value.is_integer() else value


def _entry(raw: Raw) -> dict[str, str | float]:
    if not isinstance(raw, dict):
        expected = f"a list such as {_EXAMPLES[list[MixtureEntry]]}"
        raise ValueError(f"expected {expected}, got {_show(raw)} in it")
    return {name: _float(item) if name == "weight" else _string(item) for name, item in raw.items()}


def _plain(raw: Raw) -> object:
    if isinstance(raw, list):
        return [_plain(item) for item in raw]
    if isinstance(raw, dict):
        raise ValueError("expected a list of lists, got a section inside it")
    return None if raw.is_null else raw.text


_READERS: Mapping[object, Callable[[Raw], object]] = {
    str: _string,
    bool: _bool,
    int: _integer,
    float: _float,
    int | float: _number,
    MixtureEntry: _entry,
}
_NAMES: Mapping[object, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
