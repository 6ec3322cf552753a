"""All keys as one flat table, and functional updates by dotted key."""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxpipe.config.sections import Config
from maxpipe.config.sections.fields import Bounds


@dataclass(frozen=True)
class Option:
    """One key of the configuration: `key` in full, the type and default of its field, and its bounds."""

    key: str
    type: Any
    default: Any
    bounds: Bounds

    @property
    def choices(self) -> list[str]:
        """The closed list of legal values; empty if any value of the type will do."""
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
    """The value of a key or a whole section, such as `get(config, "mesh.ici.stage")`."""
    return functools.reduce(getattr, key.split("."), config)


def is_set(config: Config, key: str) -> bool:
    """Whether a dotted key has another value than its default."""
    return get(config, key) != OPTIONS[key].default


def update(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with some keys changed; neither keys nor values are checked."""
    return _update(config, {tuple(key.split(".")): value for key, value in values.items()})


def _update(section: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    fields: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {
            path[1:]: value for path, value in values.items() if path[0] == name and len(path) > 1
        }
        fields[name] = _update(getattr(section, name), inner)
    return dataclasses.replace(section, **fields)
