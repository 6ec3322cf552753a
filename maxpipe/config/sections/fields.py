"""Declare fields of the configuration with help, legal values and what gives them an effect."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """What a value must satisfy by itself, and what it needs; see `maxpipe.config.rules` for more.

    `needs` and `acts_with` are conditions on other keys, joined by `or` and `and`: `KEY=VALUE`,
    `KEY=VALUE|VALUE`, `KEY>NUMBER`, or `KEY` alone for anything but 0, false and empty. What the
    field of a section needs (`metadata`), all keys in it need, except one that it names.

    Attributes:
      choices: legal values, of a list the legal items; None for any of the field's type.
      pattern: regular expression of legal texts, whose bytes it counts.
      form: what the legal texts are, for messages.
      variants: table of the catalogue whose names are legal values.
      also: legal values besides the variants.
      minimum, above: inclusive and exclusive lower bounds.
      maximum: inclusive upper bound.
      derived: whether -1 stands for "derive it".
      zero: a word that may be written for 0.
      needs: without this the key has no effect, and setting it is an error.
      acts_with: without this the key has no effect, and a note says so.
    """

    help: str
    choices: tuple[str, ...] | None = None
    pattern: str = ""
    form: str = ""
    variants: Mapping[str, object] | None = None
    also: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    derived: bool = False
    zero: str = ""
    needs: str = ""
    acts_with: str = ""


def option(default: object, help: str, **bounds: Any) -> Any:
    """Return a field with `Bounds(help, **bounds)` in its metadata; a default list is copied."""
    metadata = {"bounds": Bounds(help, **bounds)}
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata=metadata)
    return field(default=default, metadata=metadata)


def amount(default: float, help: str, **bounds: Any) -> Any:
    """Return a field for a number of at least 0."""
    return option(default, help, minimum=0, **bounds)


def directory(default: str, help: str) -> Any:
    """Return a field for a directory, which may be empty only by default; names in it need room."""
    some = r"(?=.*\S)" if default else ""
    form = "a directory of a file system, with names of at most 255 bytes"
    return option(default, help, pattern=some + "(?!.*://)(?!.*[^/]{256}).{0,3500}", form=form)


def derived(help: str, minimum: int = 1, **bounds: Any) -> Any:
    """Return a field for a number that is derived where it is -1, its default."""
    return option(-1, help, minimum=minimum, derived=True, **bounds)


def automatic(help: str, **bounds: Any) -> Any:
    """Return a field for a switch that is chosen for the devices where it is auto, its default."""
    return option("auto", help, choices=("auto", "true", "false"), **bounds)


def hash_of_fields(section: object) -> int:
    """Return the hash of a section by its values, those of lists included."""
    values = vars(section).values()
    return hash(tuple(tuple(v) if isinstance(v, list) else v for v in values))
