"""Raise errors that a user can correct: collected, shown together, exit code 2."""

import re
from dataclasses import dataclass

# user:password@ of a URL, where a password may hold a slash, or user@ alone.
_USER = re.compile(r"(://)(?:[^\s'\"@]*:[^\s'\"@]*|[^/\s'\"@]+)@")
_SECRET = re.compile(
    r"([?&][\w.-]*(?:key|token|secret|sig|password|credential)[\w.-]*=)[^&\s'\"]+", re.IGNORECASE
)


def redacted(text: str) -> str:
    """Return a text for the console without the secrets in its URLs: user:password@ and keys."""
    return _SECRET.sub(r"\1***", _USER.sub(r"\1***@", text))


@dataclass(frozen=True)
class Problem:
    """Something wrong with the configuration.

    Attributes:
      key: the full key to change; empty if the error concerns no key.
      message: what is wrong and what would be legal, one line.
      source: where the value came from (`file.yml:12`, `command line`), or empty.
    """

    key: str
    message: str
    source: str = ""

    def __str__(self) -> str:
        message, source = redacted(self.message), redacted(self.source)
        if self.key and source:
            return f"{self.key} ({source}): {message}"
        place = self.key or source
        return f"{place}: {message}" if place else message


class RefusedError(ValueError):
    """One or more reasons why a request is refused; each is one line that begins with its key."""

    def __init__(self, *reasons: str):
        assert reasons
        self.reasons = reasons
        super().__init__(*reasons)

    def __str__(self) -> str:
        return "\n".join(self.reasons)


class ConfigError(ValueError):
    """One or more problems; commands print them and exit with code 2, without a traceback."""

    def __init__(self, *problems: Problem):
        assert problems
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[Problem, ...]]:
        """Pickle the problems, not only the text: worker processes send exceptions this way."""
        return type(self), self.problems
