"""Errors that a user can mend: collected, shown together, exit code 2."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration.

    Attributes:
      key: the full key to change, such as `mesh.ici.stage`; empty if no single key is at fault.
      message: what is wrong and what would be right, one line.
      source: where the value came from (`file.yml:12`, `command line`), or empty.
    """

    key: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        if self.key and self.source:
            return f"{self.key} ({self.source}): {self.message}"
        where = self.key or self.source
        return f"{where}: {self.message}" if where else self.message


class ConfigError(ValueError):
    """One or more problems; command lines print them and exit with code 2, without a traceback."""

    def __init__(self, *problems: Problem):
        assert problems
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[Problem, ...]]:
        """Worker processes send exceptions by pickling; by default only the text would travel."""
        return type(self), self.problems
