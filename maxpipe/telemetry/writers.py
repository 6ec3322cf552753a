"""Write rows of metrics to `metrics.jsonl` and TensorBoard, or report once that they cannot be.

`metrics.jsonl` has one JSON object per line and is the record from which runs are compared and
plotted. A finite number is written with the shortest digits that read back as the same float64, so
two runs that agree in every bit write the same digits. JSON has no NaN and no infinity; both become
null.
"""

import errno
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record

FLUSH_SECONDS = 30  # how far a reader of TensorBoard events may lag
# Libraries that tensorboardX imports if they are installed, for features not used here; each takes
# seconds.
NOT_NEEDED = ("torch", "comet_ml")

Value = float | int | None | list[float]  # a list has a number for each layer, or stage
Row = Mapping[str, Value]
CHANGED = "changed"  # in rows about changed keys
REQUIRED = "telemetry.required"

WriterT = TypeVar("WriterT")
PrintLine = Callable[[str], None]


class TelemetryError(RuntimeError):
    """Telemetry cannot be written, and `telemetry.required` does not let the run go on without."""


def not_written(what: str, error: Exception, is_required: bool, print_line: PrintLine) -> None:
    """Warn that something cannot be written, or raise `TelemetryError` if it is required."""
    reason = f"{what} cannot be written: {getattr(error, 'strerror', None) or error}"
    if is_required:
        raise TelemetryError(f"{reason} ({REQUIRED})") from error
    print_line(f"warning: {reason}; training continues; {REQUIRED}=true would end it")


class Sink(Generic[WriterT]):
    """Holds a writer whose first error is printed, or ends the run if `telemetry.required` says so.

    Args:
      name: name of the file, for messages.
      tries_again: whether a later write may succeed; otherwise a writer that failed is given up.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], WriterT],
        *,
        is_required: bool,
        print_line: PrintLine,
        tries_again: bool = False,
    ):
        self._name = name
        self._is_required = is_required
        self._print_line = print_line
        self._tries_again = tries_again
        self._failures = 0
        self.writer: WriterT | None = None
        with self._reporting():
            self.writer = open_writer()

    def use(self, action: Callable[[WriterT], None]) -> None:
        """Call `action` with the writer, if there is one."""
        if self.writer is not None:
            with self._reporting():
                action(self.writer)

    def close(self, action: Callable[[WriterT], None]) -> None:
        """Call `action`, which closes the writer, once; print how many writes have failed."""
        self.use(action)
        if self.writer is not None and self._failures:
            times = "once" if self._failures == 1 else f"{self._failures} times"
            self._print_line(f"{self._name} lacks what could not be written {times}")
        self.writer = None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failures += 1
            if self._is_required or self._failures == 1:
                not_written(self._name, error, self._is_required, self._print_line)
            if not self._tries_again:
                self.writer = None


class MetricsFile:
    """Appends rows to a file; `write` returns after the operating system has the row.

    Opening the file drops rows of steps after `last_step`, because this process repeats those
    steps. It also drops lines that are not rows, which a crash may leave: they must not prevent an
    unattended restart. After a failed write the next row begins on a line of its own.

    A start that goes back to an older step drops nothing at first: the newer steps are saved until
    its own first save, and the next start may continue from them. Its rows go to the file of
    `unsaved_rows`, which replaces the rows after `last_step` when `give_up_later` is called. If an
    earlier start ended before that, the file that it left is removed.

    Attributes:
      lost_seconds: step time in dropped rows, also in those of a start that had saved nothing; s.
    """

    def __init__(self, path: Path, last_step: int, *, keeps_later: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._last_step = path, last_step
        self._unsaved = unsaved_rows(path)
        given_up = sum(_seconds(row[1]) for row in map(parse_row, _lines(self._unsaved)) if row)
        self._unsaved.unlink(missing_ok=True)
        self._is_apart = keeps_later  # rows of this start are in a file of their own
        self.lost_seconds = given_up + (0.0 if keeps_later else _drop_after(path, last_step))
        self._file = (self._unsaved if keeps_later else path).open("ab", buffering=0)
        self._is_torn = False

    def write(self, row: Row) -> None:
        """Append one row, which has an integer `step`."""
        self._append({key: _finite_or_none(value) for key, value in row.items()})

    def write_change(self, step: int, key: str, before: object, now: object) -> None:
        self._append({"step": step, CHANGED: key, "before": before, "now": now})

    def give_up_later(self) -> None:
        """Replace the rows after `last_step` with this start's, if they were kept."""
        if self._is_apart:
            self.lost_seconds += _drop_after(self._path, self._last_step, self._unsaved)
            apart, self._file = self._file, self._path.open("ab", buffering=0)
            self._is_apart = self._is_torn = False
            apart.close()
            self._unsaved.unlink(missing_ok=True)

    def _append(self, row: Mapping[str, object]) -> None:
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        self._is_torn = True
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "only a part of a row could be written")
        self._is_torn = False

    def close(self) -> None:
        self._file.close()


def _finite_or_none(value: Value) -> object:
    if isinstance(value, list):
        return [_finite_or_none(number) for number in value]
    return value if value is None or math.isfinite(value) else None


def unsaved_rows(path: Path) -> Path:
    """Return the file, next to `metrics.jsonl`, of a start that went back and has not saved yet."""
    return path.with_suffix(f".unsaved{path.suffix}")


def _drop_after(path: Path, last_step: int, added: Path | None = None) -> float:
    """Drop rows after `last_step` and lines that are not rows; return the dropped step time, s.

    The rows of `added`, another file, follow those that stay.
    """
    kept = []
    lost_seconds = 0.0
    for line in _lines(path):
        if (parsed := parse_row(line)) is None:
            continue
        step, row = parsed
        # A start from the same step writes its changes again.
        if step < last_step or (step == last_step and CHANGED not in row):
            kept.append(line)
        else:
            lost_seconds += _seconds(row)
    if added is not None:
        kept += [line for line in _lines(added) if parse_row(line)]
    if kept or path.exists():
        write_atomically(path, kept)
    return lost_seconds


def _lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def parse_row(line: bytes) -> tuple[int, dict[str, object]] | None:
    """Return a row and its step; None if the line is not a row."""
    try:
        row = parse_record(line, dict[str, object])
    except Damaged:
        return None
    step = row.get("step")
    return (step, row) if type(step) is int else None


def _seconds(row: Mapping[str, object]) -> float:
    seconds = row.get("step_seconds")
    return seconds if isinstance(seconds, float) else 0.0


class TensorBoard:
    """Writes scalars and texts as TensorBoard events; hides earlier points after `last_step`.

    The calling thread writes, so it also gets the errors: tensorboardX's own writer has a thread
    and a queue, and when the thread dies of a full disk, the queue fills and blocks the caller.
    """

    def __init__(self, directory: Path, last_step: int):
        hidden = [name for name in NOT_NEEDED if name not in sys.modules]
        # None is Python's sign for a module that is not installed.
        sys.modules.update((name, cast(ModuleType, None)) for name in hidden)
        try:  # here, since the import takes a quarter of a second
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import scalar, text
        finally:
            for name in hidden:
                del sys.modules[name]
        self._event = Event
        self._scalar, self._text = scalar, text
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"))
        started = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=last_step + 1, session_log=started)
        self._file.write_event(event)
        self.flush()

    def write(self, step: int, scalars: Row) -> None:
        now = time.time()
        for name, value in scalars.items():
            if _finite_or_none(value) is not None:
                summary = self._scalar(name, value)
                self._file.write_event(self._event(wall_time=now, step=step, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text, which TensorBoard shows as it is because Markdown's code is indented."""
        summary = self._text(name, f"    {text}".replace("\n", "\n    "))
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
