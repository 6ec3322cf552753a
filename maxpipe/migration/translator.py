"""Turn MaxText's values into maxpipe's, with notes, problems and origins."""

from dataclasses import dataclass, field

from maxpipe.config.errors import Problem
from maxpipe.config.maxtext import KEYS, Value
from maxpipe.config.values import as_written, is_finite
from maxpipe.migration.read import MaxTextConfig

_DEFAULTS: dict[str, Value] = {key: entry.default for key, entry in KEYS.items()}
_DEFAULTS |= {"steps": 150_001, "sparse_matmul": True}  # which have no entry there


@dataclass
class Translator:
    """A MaxText configuration on its way to one of maxpipe.

    Attributes:
      num_devices: number of devices over all slices; 0 if it is not known.
      values: value by maxpipe's key.
      origins: maxpipe's key -> MaxText's keys that its value comes from.
      notes: what differs or is left out, one line each.
      keys_read: MaxText's keys whose values the translation has looked at.
    """

    theirs: MaxTextConfig
    num_devices: int = 0
    num_slices: int = 1
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    keys_read: set[str] = field(default_factory=set)

    def value(self, key: str) -> Value:
        """Return the value of a MaxText key, from its files and words or else its default."""
        self.keys_read.add(key)
        return self.theirs.values[key] if key in self.theirs.values else _DEFAULTS.get(key)

    def text(self, key: str) -> str:
        """Return a value as text; None is empty."""
        value = self.value(key)
        return "" if value is None else str(value)

    def is_on(self, key: str) -> bool:
        """Return a value that is true or false; None is false."""
        value = self.value(key)
        if not isinstance(value, bool | None):
            self.refuse(key, f"expected true or false, got {value}")
            return False
        return bool(value)

    def number(self, key: str, default: float = 0) -> float:
        """Return a number; None is the default, and anything else a problem."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"expected a number, got {value}")
            return default
        return value if is_finite(value) else default  # `translate` refuses such values

    def integer(self, key: str, default: int = 0) -> int:
        """Return a whole number; None is the default, and anything else a problem."""
        value = self.number(key, default)
        if value != int(value):
            self.refuse(key, f"expected a whole number, got {value}")
        return int(value)

    def set(self, key: str, value: object, *origins: str) -> None:
        """Give a key of maxpipe its value, which comes from MaxText's keys `origins`."""
        self.values[key] = value
        self.origins[key] = origins

    def copy(self, *keys: str) -> None:
        """Give the counterparts of MaxText's keys the same values, if they have any."""
        for key in keys:
            if self.value(key) is not None:
                self.set(KEYS[key].ours, self.value(key), key)

    def note(self, key: str, message: str) -> None:
        """Report a difference that does not stand in the way."""
        value = self.value(key)
        self.notes.append(f"{key}={'' if value is None else as_written(value)}: {message}")

    def refuse(self, key: str, message: str) -> None:
        """Report a value that cannot be translated or is not understood."""
        self.problems.append(Problem(key, message, self.theirs.chosen.get(key, "")))
