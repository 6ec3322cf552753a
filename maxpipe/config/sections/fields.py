"""Declare dataclass fields that carry their help text and their legal values: `option(...)`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """What a value must satisfy by itself; rules across keys are in `maxpipe.config.rules`.

    Attributes:
      help: one line for users, printed by `--help KEY`.
      choices: legal values, or None for any of the field's type.
      variants: table of the catalogue whose names are legal values.
      also: legal values besides the variants.
      minimum, above: inclusive and exclusive lower bounds.
      maximum: inclusive upper bound.
      derived: whether -1 stands for "derive it".
      zero: a word that may be written for 0.
    """

    help: str
    choices: tuple[str, ...] | None = None
    variants: Mapping[str, object] | None = None
    also: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    derived: bool = False
    zero: str = ""


def option(default: object, help: str, **bounds: Any) -> Any:
    """Return a field with `Bounds(help, **bounds)` in its metadata; a default list is copied."""
    metadata = {"bounds": Bounds(help, **bounds)}
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata=metadata)
    return field(default=default, metadata=metadata)


def hash_of_fields(section: object) -> int:
    """Return the hash of a section by its values, those of lists included."""
    values = vars(section).values()
    return hash(tuple(tuple(v) if isinstance(v, list) else v for v in values))
