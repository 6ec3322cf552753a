"""Handle telemetry that cannot be written: one warning, or the end of the run."""

import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

REQUIRED = "telemetry.required"
REOPENING_SECONDS = 30  # between attempts to open a writer, which may have to read a large file

Writer = TypeVar("Writer")


class TelemetryError(RuntimeError):
    """Telemetry cannot be written, and `telemetry.required` does not let the run go on without."""


class Sink(Generic[Writer]):
    """Holds a writer whose errors do not end training unless telemetry is required.

    The first error is printed; at the end, so is the number of failed writes.

    Args:
      name: name of the file, for messages.
      open_writer: function that returns the writer; may raise OSError.
      is_required: `telemetry.required`.
      print_line: function that prints a line.
      tries_again: whether a later write, or opening the writer later, may succeed after one has
        failed; otherwise the writer is given up.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], Writer],
        *,
        is_required: bool,
        print_line: Callable[[str], None],
        tries_again: bool = False,
    ):
        self._name = name
        self._is_required = is_required
        self._print_line = print_line
        self._tries_again = tries_again
        self._failures = 0  # uses that have failed
        self._has_warned = False
        self._open_writer: Callable[[], Writer] | None = open_writer  # None once closed or given up
        self._next_opening = -math.inf
        self.writer: Writer | None = None
        self._try(lambda _: None)

    def use(self, action: Callable[[Writer], None]) -> None:
        """Call `action` with the writer, if there is one.

        Raises:
          TelemetryError: it cannot be written, and telemetry is required.
        """
        self._failures += not self._try(action)

    def close(self, action: Callable[[Writer], None]) -> None:
        """Call `action`, which closes the writer, and print how many writes have failed."""
        if self.writer is not None:
            self.use(action)
        self.writer = self._open_writer = None
        if self._tries_again and self._failures:
            times = "once" if self._failures == 1 else f"{self._failures} times"
            self._print_line(f"{self._name} lacks what could not be written {times}")
            self._failures = 0

    def _try(self, action: Callable[[Writer], None]) -> bool:
        """Call `action` with the writer, opened first if need be; return whether nothing failed."""
        if self._open_writer is None:
            return True
        try:
            if self.writer is None:
                if time.monotonic() < self._next_opening:
                    return False
                self._next_opening = time.monotonic() + REOPENING_SECONDS
                self.writer = self._open_writer()
            action(self.writer)
        except OSError as error:
            reason = f"{self._name} cannot be written: {error.strerror or error}"
            if self._is_required:
                raise TelemetryError(f"{reason} ({REQUIRED})") from error
            if not self._has_warned:
                remedy = f"{REQUIRED}=true would end it"
                self._print_line(f"warning: {reason}; training continues; {remedy}")
            self._has_warned = True
            if not self._tries_again:
                self.writer = self._open_writer = None
            return False
        return True
