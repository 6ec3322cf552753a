"""Where rows of metrics are written: `metrics.jsonl` and TensorBoard.

`metrics.jsonl` has one JSON object per line and is the record from which runs are compared and
plotted. A finite number is written with the shortest digits that read back as the same float64, so
two runs that agree in every bit write the same digits. JSON has no NaN and no infinity; both become
null.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from maxpipe.storage.local_files import write_atomically

Row = Mapping[str, float | int | None]
CHANGED = "changed"  # in rows about changed keys


class MetricsFile:
    """Appends rows to a file; `write` returns after the operating system has the row.

    Opening the file drops rows of steps after `last_step`, because this process repeats those
    steps. It also drops lines that are not rows, which a crash may leave: they must not prevent an
    unattended restart.

    Args:
      path: the file; made with its directory if it does not exist.
      last_step: step of the restored checkpoint, 0 for a new run.

    Attributes:
      lost_seconds: step time in the dropped rows.
    """

    def __init__(self, path: Path, last_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost_seconds = _drop_after(path, last_step) if path.exists() else 0.0
        self._file: TextIO = path.open("a", encoding="utf-8", newline="\n")

    def write(self, row: Row) -> None:
        """Append one row, which has an integer `step`."""
        finite = {key: _finite_or_none(value) for key, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def write_change(self, step: int, key: str, before: object, now: object) -> None:
        """Append a row about a key whose value was changed after `step`."""
        row = {"step": step, CHANGED: key, "before": before, "now": now}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite_or_none(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None


def _drop_after(path: Path, last_step: int) -> float:
    """Drop rows after `last_step` and lines that are not rows; return the dropped step time, s."""
    kept = []
    lost_seconds = 0.0
    for line in path.read_bytes().splitlines(keepends=True):
        row = _parse(line)
        if row is None:
            continue
        step, seconds, is_change = row
        # A start from the same step writes its changes again.
        if step < last_step or (step == last_step and not is_change):
            kept.append(line)
        else:
            lost_seconds += seconds
    write_atomically(path, kept)
    return lost_seconds


def _parse(line: bytes) -> tuple[int, float, bool] | None:
    """Return step, step time (0 if it has none) and whether it is about a change, of a row.

    None if the line is not a row.
    """
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not (line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)):
        return None
    seconds = row.get("step_seconds")
    return row["step"], seconds if isinstance(seconds, float) else 0.0, CHANGED in row


class TensorBoard:
    """Writes scalars as TensorBoard events through tensorboardX.

    Args:
      directory: of the event files.
      last_step: points that an earlier process wrote after this step are hidden.
    """

    def __init__(self, directory: Path, last_step: int):
        # The import takes a quarter of a second, which only the process that writes should pay.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1)

    def write(self, step: int, scalars: Row) -> None:
        """Write one point for each name that has a value."""
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hand all points to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
