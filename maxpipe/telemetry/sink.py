"""Handle telemetry that cannot be written: one warning, or the end of the run."""

from collections.abc import Callable
from typing import Generic, TypeVar

REQUIRED = "telemetry.required"

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
      tries_again: whether a later write may succeed after one has failed; otherwise the writer is
        given up.
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
        self._failures = 0
        self.writer: Writer | None = None
        try:
            self.writer = open_writer()
        except OSError as error:
            self._fail(error)

    def use(self, action: Callable[[Writer], None]) -> None:
        """Call `action` with the writer, if there is one.

        Raises:
          TelemetryError: it cannot be written, and telemetry is required.
        """
        if self.writer is None:
            return
        try:
            action(self.writer)
        except OSError as error:
            if not self._tries_again:
                self.writer = None
            self._fail(error)

    def close(self, action: Callable[[Writer], None]) -> None:
        """Call `action`, which closes the writer, and print how many writes have failed."""
        self.use(action)
        self.writer = None
        if self._tries_again and self._failures:
            self._print_line(f"{self._name} lacks what could not be written {self._failures} times")
            self._failures = 0

    def _fail(self, error: OSError) -> None:
        self._failures += 1
        reason = f"{self._name} cannot be written: {error.strerror or error}"
        if self._is_required:
            raise TelemetryError(f"{reason} ({REQUIRED})") from error
        if self._failures == 1:
            self._print_line(f"warning: {reason}; training continues; {REQUIRED}=true would end it")
