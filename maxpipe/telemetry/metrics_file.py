"""`metrics.jsonl`: one JSON object per line, the record from which runs are compared and plotted.

Finite numbers are written with the shortest digits that read back as the same float64, so two runs
that agree bit for bit write the same digits. JSON has no NaN and no infinity: both become null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

Row = Mapping[str, float | int | None]


class MetricsFile:
    """Appends rows to a file; each is handed to the operating system before `write` returns.

    Opening keeps whole rows up to `last_step`, the step of the restored checkpoint (0 for a fresh
    run): the steps after it are about to be done again. Lines that are no rows, as a crash leaves
    them, are dropped as well: an unattended restart must not fail over its log.

    Attributes:
      lost_seconds: step time in the rows dropped.
    """

    def __init__(self, path: Path, last_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost_seconds = _drop_after(path, last_step) if path.exists() else 0.0
        self._file: TextIO = path.open("a", encoding="utf-8", newline="\n")

    def write(self, row: Row) -> None:
        """Appends one row, which has an integer `step`."""
        finite = {key: _finite(value) for key, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None


def _drop_after(path: Path, last_step: int) -> float:
    """Rewrites the file and returns the step time in what is dropped, seconds.

    A crash meanwhile leaves either the old file or the new one.
    """
    kept = []
    lost = 0.0
    for line in path.read_bytes().splitlines(keepends=True):
        row = _row(line)
        if row is None:
            continue
        if row["step"] <= last_step:
            kept.append(line)
        elif isinstance(seconds := row.get("step_seconds"), float):
            lost += seconds
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return lost


def _row(line: bytes) -> dict[str, Any] | None:
    """The row on a line, or None if the line is not a whole row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_row = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_row else None
