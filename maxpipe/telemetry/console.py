"""Show the run on the console: a progress bar on a terminal, plain lines otherwise."""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TextIO

from tqdm import tqdm

from maxpipe.config.terminal import emit, folded, terminal_width

WINDOW = 20  # steps of the running median
SECONDS_BETWEEN_LINES = 5.0  # about bytes


class Console:
    """Shows steps, and text between them.

    Step time, tokens/s, MFU and time left come from the median of the last `WINDOW` steps, so one
    stall does not distort them. The first step of a process, or of another batch size, compiles and
    never enters the median; its line has its own seconds, and no speed.

    Args:
      log_every: print every so many steps, and the first and the last one; 0 = no steps.
      peak_seconds: seconds of a step at the peak FLOP/s of all devices; None leaves MFU out.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int,
        log_every: int,
        tokens_per_step: int,
        peak_seconds: float | None,
        stream: TextIO | None = None,
    ):
        self._total = total_steps
        self._log_every = log_every
        self._tokens = tokens_per_step
        self._peak_seconds = peak_seconds
        self._stream = stream or sys.stdout
        self._start_step = start_step
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._unprinted: Mapping[str, Any] | None = None
        self._has_bar = bool(log_every) and self._stream.isatty()
        self._bar: tqdm | None = None  # from the first step on, below what is printed before

    def new_batch(self, step: int, tokens_per_step: int, peak_seconds: float | None) -> None:
        """Go on after `step` with batches of another size, for which the next step may compile."""
        self._start_step, self._tokens, self._peak_seconds = step, tokens_per_step, peak_seconds
        self._recent.clear()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step: a row of `metrics.jsonl`, in which numbers may be not finite.

        Besides the loss and the learning rate it shows other losses, whose names end in `_loss`,
        and the largest of the layers' `expert_load_max` and `dropped_assignments`.
        """
        step = row["step"]
        is_first = step == self._start_step + 1
        if not is_first:
            self._recent.append(row["step_seconds"])
        if self._bar is not None:
            self._bar.set_description_str(self._line(row), refresh=False)
            self._bar.update(1)
        elif self._has_bar:
            self._bar = open_bar(
                self._stream,
                desc=self._line(row),
                total=self._total,
                initial=step,
                bar_format="{desc} |{bar}|",
            )
        elif self._log_every:
            self._unprinted = row
            if is_first or step % self._log_every == 0 or step == self._total:
                self._print_step()

    def print_line(self, text: str) -> None:
        """Print `text` on lines of its own, above the progress bar if there is one."""
        text = folded(text, terminal_width(self._stream))
        if self._bar is not None:
            with tqdm.external_write_mode(file=self._stream):
                emit(text, self._stream)
        else:
            emit(text, self._stream)

    def close(self) -> None:
        """Show the last step if it has not been printed, as when a run is stopped early."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None
        elif self._unprinted is not None:
            self._print_step()

    def _print_step(self) -> None:
        assert self._unprinted is not None
        emit(self._line(self._unprinted), self._stream)
        self._unprinted = None

    def _line(self, row: Mapping[str, Any]) -> str:
        step = row["step"]
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}", f"loss {row['loss']:.4f}"]
        loads, dropped = (row.get(key, ()) for key in ("expert_load_max", "dropped_assignments"))
        details = [
            *(f"{name} {value:.3g}" for name, value in row.items() if name.endswith("_loss")),
            *(f"max load {load:.2f}x (layer {i})" for load, i in _largest(loads)),
            *(f"dropped {share:.1%} (layer {i})" for share, i in _largest(dropped) if share),
            f"lr {row['learning_rate']:.2e}",
        ]
        if not self._recent:
            first = format_step_time(row["step_seconds"])
            return self._fitting(parts, details, [f"{first} for the first step", "left ?"])
        seconds = median(self._recent)
        speed = [
            f"{format_step_time(seconds)}/step",
            f"{format_count(self._tokens / seconds)} tokens/s",
        ]
        if self._peak_seconds is not None:
            speed.append(f"MFU {100 * self._peak_seconds / seconds:.1f} %")
        left = format_seconds(seconds * (self._total - step))
        return self._fitting(parts, details, [*speed, f"left {left}"])

    def _fitting(self, start: list[str], details: list[str], end: list[str]) -> str:
        """Return one line of all parts, without the last details if a terminal has no room."""
        line = "  ".join([*start, *details, *end])
        if details and len(line) > (terminal_width(self._stream) or math.inf):
            return self._fitting(start, details[:-1], end)
        return line


def _largest(values: Sequence[float]) -> list[tuple[float, int]]:
    """Return the largest of the layers' values and its layer; nothing if no layer has one."""
    numbers = [(value, layer) for layer, value in enumerate(values) if not math.isnan(value)]
    return [max(numbers)] if numbers else []


def open_bar(stream: TextIO, **options: Any) -> tqdm:
    try:
        has_size = all(os.get_terminal_size(stream.fileno()))
    except OSError:
        has_size = False
    # On 0 x 0, as terminals of scripts and containers report, tqdm would draw nothing.
    size = {"dynamic_ncols": True} if has_size else {"ncols": 120, "nrows": 40}
    return tqdm(file=stream, **size, **options)


class ByteProgress:
    """Prints every few seconds how many of `total` bytes have been read."""

    def __init__(self, label: str, total: int, print_line: Callable[[str], None]):
        self._label = f"{label:<12}"
        self._total = total
        self._print_line = print_line
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def show(self, done: int) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            total = format_bytes(self._total)
            self._print_line(f"{self._label}{format_bytes(done)} of {total} are read")


def format_bytes(count: int) -> str:
    """Return a number of bytes in GB, or in MB or kB below a tenth of the larger unit."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    factor, unit = next((unit for unit in units if count >= unit[0] / 10), units[-1])
    return f"{count / factor:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_step_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 2}f} ms"


def format_count(count: float) -> str:
    """Return three significant digits with k, M, G or T (powers of 1000)."""
    if abs(count) < 999.5:
        return f"{count:.3g}"
    for unit in ("k", "M", "G", "T"):
        count /= 1000
        if abs(count) < 999.5 or unit == "T":
            break
    return f"{count:#.3g}".rstrip(".") + unit
