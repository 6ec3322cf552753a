"""`option(...)`: a dataclass field that carries its help text and its legal values."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy by itself; rules across keys live in `maxpipe.config.checks`.

    Attributes:
      help: one line for users, printed by `--help KEY`.
      choices: legal values, or None for any of the field's type.
      variants: dotted name of a package whose modules are the legal values, listed without importing them.
      also: legal values beside the variants.
      minimum, above: inclusive and exclusive lower bounds.
      maximum: inclusive upper bound.
      derived: True if -1 stands for "derive it".
    """

    help: str
    choices: tuple[Any, ...] | None = None
    variants: str | None = None
    also: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    derived: bool = False


def option(default: Any, help: str, **rule: Any) -> Any:
    """A field with that default and `Rule(help, **rule)` under metadata["rule"]; lists are copied."""
    metadata = {"rule": Rule(help, **rule)}
    if isinstance(default, list):
        return field(default_factory=lambda: [*default], metadata=metadata)
    return field(default=default, metadata=metadata)
