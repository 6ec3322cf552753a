"""Errors that a user can correct: collected, shown together, exit code 2."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something wrong with the configuration.

    Attributes:
      key: the full key to change, such as `mesh.ici.stage`; empty if the error concerns no key.
      message: what is wrong and what would be legal, one line.
      source: where the value came from (`file.yml:12`, `command line`), or empty.
    """

    key: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        if self.key and self.source:
            return f"{self.key} ({self.source}): {self.message}"
        place = self.key or self.source
        return f"{place}: {self.message}" if place else self.message


class ConfigError(ValueError):
    """One or more problems; commands print them and exit with code 2, without a traceback."""

    def __init__(self, *problems: Problem):
        assert problems
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[Problem, ...]]:
        """Pickle the problems, not only the text: worker processes send exceptions so."""
        return type(self), self.problems
