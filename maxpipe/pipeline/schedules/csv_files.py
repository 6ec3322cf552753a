"""Tables as CSV, in the notation of torch.distributed.pipelining.

No header; one row per stage; a cell such as `2F0` is global chunk, kind, microbatch; an empty cell
is idle. In a free-running table a column is a tick. In a lockstep table a tick is two columns: F,
then whichever of B and I there is; if the table has W units there is a third one for them. A file
whose cells are all in the columns of their kind is read as lockstep.
"""

import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules.table import (
    IDLE,
    LOCKSTEP_COLUMN,
    ScheduleError,
    Table,
    stages_of_chunks,
)
from maxpipe.pipeline.schedules.validate import validate

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
MAX_SLOTS = 1 << 26  # of a table, which is kept as arrays of this size


class Cell(NamedTuple):
    """A cell of the file; row and column count from 0."""

    row: int
    column: int
    chunk: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        unit = f"{self.chunk}{self.kind}{self.microbatch}"
        return f"{unit} (row {self.row + 1}, column {self.column + 1})"


def to_csv(table: Table) -> str:
    """Return the table as CSV text."""
    width = table.columns_per_tick
    rows = [[""] * (table.num_ticks * width) for _ in range(table.num_stages)]
    for kind in table.kinds:
        tick, stage, microbatch, chunk = (a.tolist() for a in table.units(kind))
        position = table.global_chunk(np.array(chunk, int), np.array(stage, int)).tolist()
        for t, s, m, g in zip(tick, stage, microbatch, position, strict=True):
            rows[s][t * width + (LOCKSTEP_COLUMN[kind] if table.lockstep else 0)] = f"{g}{kind}{m}"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def csv_sizes(path: str | Path) -> tuple[int, int, int]:
    """Return the numbers of stages, microbatches and repeats of a CSV table.

    Raises:
      ScheduleError: the file cannot be read, or a cell is not a unit.
    """
    return _sizes(*_read(Path(path)))


def load_csv(
    path: str | Path,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    *,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """Read and validate a table.

    Args:
      path: the file.
      num_stages, num_microbatches, num_repeats: sizes that the table must have.
      forwarding_delay, slack: as in `Table`; the file's ticks must leave room for them.

    Raises:
      ScheduleError: the file cannot be read, is for other sizes, or is not a valid schedule; names
        row, column and cell.
    """
    path = Path(path)
    num_rows, cells = _read(path)
    sizes = _sizes(num_rows, cells)
    if sizes != (num_stages, num_microbatches, num_repeats):
        raise ScheduleError(
            f"pipeline.schedule={path}: the file is for {sizes[0]} stages, {sizes[1]} microbatches "
            f"and {sizes[2]} repeats, but mesh.ici.stage={num_stages}, "
            f"pipeline.num_microbatches={num_microbatches} and pipeline.num_repeats={num_repeats}"
        )
    width = 3 if any(cell.kind == "W" for cell in cells) else 2
    lockstep = all(cell.column % width == LOCKSTEP_COLUMN[cell.kind] for cell in cells)
    width = width if lockstep else 1
    shape = (1 + max(cell.column for cell in cells) // width, num_stages)
    kinds = {"F", *(cell.kind for cell in cells)}
    if kinds == {"F"}:
        kinds.add("B")
    microbatch = {kind: np.full(shape, IDLE, np.int32) for kind in kinds}
    chunk = {kind: np.full(shape, IDLE, np.int32) for kind in kinds}
    for cell in cells:
        at = (cell.column // width, cell.row)
        microbatch[cell.kind][at] = cell.microbatch
        chunk[cell.kind][at] = cell.chunk // num_stages
    table = Table(
        name=path.stem,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        microbatch=microbatch,
        chunk=chunk,
        placement=_placement(path, cells, num_stages, num_repeats),
        lockstep=lockstep,
        forwarding_delay=forwarding_delay,
        slack=slack,
        source=str(path),
    )
    validate(table)
    return table


def _read(path: Path) -> tuple[int, list[Cell]]:
    """Return the number of rows and the cells that are not empty."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8").rstrip("\n").split("\n")))
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        if isinstance(error, csv.Error):
            reason = str(error)
        raise ScheduleError(f"pipeline.schedule={path}: cannot read it: {reason}") from error
    cells = []
    for row, texts in enumerate(rows):
        for column, text in enumerate(t.strip() for t in texts):
            match = CELL.fullmatch(text)
            if match:
                cells.append(Cell(row, column, int(match[1]), match[2], int(match[3])))
            elif text:
                raise ScheduleError(
                    f"pipeline.schedule={path}: row {row + 1}, column {column + 1}: {text!r} is "
                    f"not a unit; write the global chunk, F, B, I or W, and the microbatch, as in "
                    f"2F0; an empty cell is idle"
                )
    if not cells:
        raise ScheduleError(f"pipeline.schedule={path}: the file has no units")
    _check_size(path, len(rows), cells)
    return len(rows), cells


def _check_size(path: Path, num_rows: int, cells: list[Cell]) -> None:
    """Raise ScheduleError before memory is taken for a table that cannot be valid."""
    chunk = max(cells, key=lambda cell: cell.chunk)
    microbatch = max(cells, key=lambda cell: cell.microbatch)
    num_units = (chunk.chunk + 1) * (microbatch.microbatch + 1)
    if num_units > len(cells):
        raise ScheduleError(
            f"pipeline.schedule={path}: {chunk} and {microbatch} are the last chunk and the last "
            f"microbatch, so there must be {num_units} units of each kind; the file has "
            f"{len(cells)} in all"
        )
    if num_rows * (1 + max(cell.column for cell in cells)) > MAX_SLOTS:
        raise ScheduleError(f"pipeline.schedule={path}: more than {MAX_SLOTS} cells are too many")


def _sizes(num_rows: int, cells: list[Cell]) -> tuple[int, int, int]:
    num_chunks = 1 + max(cell.chunk for cell in cells)
    return num_rows, 1 + max(cell.microbatch for cell in cells), -(-num_chunks // num_rows)


def _placement(path: Path, cells: list[Cell], num_stages: int, num_repeats: int) -> str:
    """Return `loop` or `v`, whichever all cells agree with.

    Raises:
      ScheduleError: neither; names a cell that contradicts the placement that fits better.
    """
    strays = {}
    for placement in ("loop", "v"):
        stage = stages_of_chunks(num_stages, num_repeats, placement)
        strays[placement] = [cell for cell in cells if stage[cell.chunk] != cell.row]
        if not strays[placement]:
            return placement
    placement = min(strays, key=lambda p: len(strays[p]))
    stray = strays[placement][0]
    row = 1 + int(stages_of_chunks(num_stages, num_repeats, placement)[stray.chunk])
    raise ScheduleError(
        f"pipeline.schedule={path}: {stray} is on the wrong stage; chunk {stray.chunk} belongs to "
        f"row {row}"
    )
