"""Show how many bytes have been read: a bar on a terminal, a line every few seconds otherwise."""

import time
from collections.abc import Callable
from typing import Self, TextIO

from tqdm import tqdm

from maxpipe.telemetry.console import open_bar

SECONDS_BETWEEN_LINES = 5.0


class ByteProgress:
    """Shows a growing number of bytes; as a context manager, ends the bar's line.

    Args:
      label: what is read, at most eleven characters.
      total: number of bytes to read.
      print_line: function that prints a line.
      stream: stream that gets a bar if it is a terminal; None = lines in any case.
    """

    def __init__(
        self,
        label: str,
        total: int,
        print_line: Callable[[str], None],
        stream: TextIO | None = None,
    ):
        self._label = f"{label:<12}"
        self._print_line = print_line
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._bar: tqdm | None = None
        self._shown = 0
        self.total = total
        if stream is not None and stream.isatty():
            self._bar = open_bar(
                stream,
                total=total,
                desc=self._label,
                unit="B",
                unit_scale=True,
                bar_format="{desc}|{bar}| {n_fmt}B of {total_fmt}B, {rate_fmt}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int) -> None:
        """Show that `done` bytes have been read; a line only if the last one is old enough."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif done > self._shown and time.monotonic() >= self._next_line:
            self._shown = done
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            factor, unit = _unit_of(self.total)
            amounts = f"{done / factor:.2f} of {self.total / factor:.2f} {unit}"
            self._print_line(f"{self._label}{amounts} are read")


def format_bytes(count: int) -> str:
    """Return a number of bytes in GB, or in MB or kB below a tenth of the larger unit."""
    factor, unit = _unit_of(count)
    return f"{count / factor:.2f} {unit}"


def _unit_of(count: int) -> tuple[float, str]:
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if count >= unit[0] / 10), units[-1])
