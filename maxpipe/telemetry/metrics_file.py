"""`metrics.jsonl`: one JSON object per line, the record from which runs are compared and plotted.

Finite numbers are written with the shortest digits that read back as the same float64, so two runs that agree
bit for bit write the same digits. JSON has no NaN and no infinity: both become null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

Row = Mapping[str, float | int | None]


class MetricsFile:
    """Appends rows to a file; each is handed to the operating system before `write` returns.

    Opening keeps whole rows up to `last_step`, the step of the restored checkpoint (0 for a fresh run): the
    steps after it are about to be done again. Lines that are no rows, as a crash leaves them, are dropped as
    well: an unattended restart must not fail over its log.
    """

    def __init__(self, path: Path, last_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_after(path, last_step)
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


def _drop_after(path: Path, last_step: int) -> None:
    """Rewrites the file; a crash meanwhile leaves either the old file or the new one."""
    kept = [
        line
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n") and (step := _step_of(line)) is not None and step <= last_step
    ]
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _step_of(line: bytes) -> int | None:
    """The step of a row, or None if the line is not a row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None
