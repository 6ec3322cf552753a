"""All keys as one flat table: read and update them, and find what a misspelt key probably means."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.config.maxtext import KEYS
from maxpipe.config.sections import Config
from maxpipe.config.sections.fields import Bounds

_CUTOFF = 0.6  # likeness from which on a key is proposed
_TYPO = 0.9  # a key more like one of MaxText than this is taken for a misspelling of it


@dataclass(frozen=True)
class Option:
    """A key of the configuration: its full name, the type and default of its field, its bounds."""

    key: str
    type: object
    default: object
    bounds: Bounds

    @property
    def choices(self) -> list[str]:
        """The closed list of legal values; empty if there is none."""
        if self.bounds.variants is not None:
            return [*self.bounds.also, *self.bounds.variants]
        return [str(choice) for choice in self.bounds.choices or ()]


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Option | type]]:
    for field in dataclasses.fields(section):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            yield key, typing.cast(type, field.type)
            yield from _walk(typing.cast(type, field.type), key + ".")
        else:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            yield key, Option(key, field.type, default, field.metadata["bounds"])


_TABLE = dict(_walk(Config, ""))
OPTIONS: Mapping[str, Option] = {
    key: entry for key, entry in _TABLE.items() if isinstance(entry, Option)
}
SECTIONS: Mapping[str, type] = {
    key: entry for key, entry in _TABLE.items() if isinstance(entry, type)
}


def get(config: Config, key: str) -> Any:
    """Return the value of a key or section, such as `get(config, "mesh.ici.stage")`."""
    return functools.reduce(getattr, key.split("."), config)


def is_set(config: Config, key: str) -> bool:
    """Return whether a key has another value than its default."""
    return get(config, key) != OPTIONS[key].default


def update(config: Config, values: Mapping[str, object]) -> Config:
    """Return a copy with some keys changed; neither keys nor values are checked."""
    return _update(config, {tuple(key.split(".")): value for key, value in values.items()})


def unknown_key(key: str, is_section: bool = False) -> str:
    """Return the message for a key that does not exist.

    It gives our name of a key of MaxText, else the nearest keys.
    """
    if key in KEYS:
        ours, differs = KEYS[key]
        if not ours:
            return f"MaxText's {key} has no counterpart: {differs}"
        return f"MaxText's {key} is called {ours} here" + (f" ({differs})" if differs else "")
    if theirs := difflib.get_close_matches(key, KEYS, n=1, cutoff=_TYPO):
        return f"unknown key; {unknown_key(theirs[0])}"
    if near := nearest_keys(key, is_section):
        return f"unknown key; did you mean {' or '.join(near)}?"
    return "unknown key; --print-config lists all of them"


def nearest_keys(key: str, is_section: bool = False) -> list[str]:
    """Return up to three full keys, at any level, that are like `key`, the most alike first.

    Keys that end in the same word come before all others, those of the same section first.
    """
    names = list(SECTIONS if is_section else OPTIONS)
    section, _, last = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return sorted(same, key=lambda name: -_likeness(name.rpartition(".")[0], section))[:3]
    scores = {
        name: max(_likeness(name, key), 0.95 * _likeness(name.rpartition(".")[2], last))
        for name in names
    }
    best = max(scores.values())
    return [name for name in names if scores[name] >= max(_CUTOFF, best - 1e-9)][:3]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _update(section: Any, values: Mapping[tuple[str, ...], object]) -> Any:
    fields: dict[str, object] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {
            path[1:]: value for path, value in values.items() if path[0] == name and len(path) > 1
        }
        fields[name] = _update(getattr(section, name), inner)
    return dataclasses.replace(section, **fields)
