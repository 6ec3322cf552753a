"""Read and write tables as CSV, in the notation of torch.distributed.pipelining.

No header; one row per stage; a cell such as `2F0` is global chunk, kind, microbatch; an empty cell
is idle. In a free-running table a column is a tick. In a lockstep table a tick is two columns: F,
then whichever of B and I there is; if the table has W units there is a third one for them. A file
whose cells are all in the columns of their kind is read as lockstep.

Files that torch has dumped are read as they are. `(0F3;3B1)OVERLAP_F_B` is 0F3, then 3B1. Cells for
transfers, gathers and reductions (`1RECV_F0`, `0UNSHARD`) are ignored: the engines place these
themselves. A file with such cells, or without any idle cell between units, is an order of units on
each stage; each unit then runs in the first tick that the order and its inputs allow.
"""

import csv
import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.config.rules.layout import LOCKSTEP_COLUMN, in_lockstep
from maxpipe.pipeline.schedules.order import RawUnit, place
from maxpipe.pipeline.schedules.table import (
    IDLE,
    ScheduleError,
    Table,
    stages_of_chunks,
)
from maxpipe.pipeline.schedules.validate import validate

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
NO_UNIT = "is not a unit: global chunk, F, B, I or W, microbatch, as in 2F0; an empty cell is idle"
IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


class Cell(NamedTuple):
    """A unit of the file; row and column count from 0."""

    row: int
    column: int
    chunk: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        unit = f"{self.chunk}{self.kind}{self.microbatch}"
        return f"{unit} (row {self.row + 1}, column {self.column + 1})"


class CsvFile(NamedTuple):
    """A file.

    Attributes:
      cells: its units, by row, in the row's order.
      ignored: number of its cells of each kind that is not a unit.
      has_overlaps: whether a cell holds two units.
    """

    num_rows: int
    cells: list[Cell]
    ignored: Counter[str]
    has_overlaps: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        num_chunks = 1 + max(cell.chunk for cell in self.cells)
        num_microbatches = 1 + max(cell.microbatch for cell in self.cells)
        return self.num_rows, num_microbatches, -(-num_chunks // self.num_rows)

    @property
    def is_order(self) -> bool:
        """Return whether columns are not ticks, so that only the order of units counts."""
        if self.ignored or self.has_overlaps:
            return True
        position: Counter[int] = Counter()
        for cell in self.cells:
            if cell.column != position[cell.row]:
                return False
            position[cell.row] += 1
        return self.num_rows > 1

    def note(self, path: Path) -> str:
        """Return how the order of a file was read, for the user."""
        reason = "it has cells with two units, or no idle cells between units"
        if self.ignored:
            reason = (
                f"the engines place transfers, gathers and reductions themselves; ignored are "
                f"{self.ignored.total()} cells ({', '.join(sorted(self.ignored))})"
            )
        return f"pipeline.schedule={path}: read as an order of units, not as ticks: {reason}"


def read_cells(path: Path) -> CsvFile:
    """Read a file.

    Raises:
      ScheduleError: it cannot be read, or a cell is neither a unit nor something to ignore.
    """
    try:
        # utf-8-sig drops the byte order mark that spreadsheets write.
        rows = list(csv.reader(path.read_text("utf-8-sig").rstrip("\r\n").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"pipeline.schedule={path}: cannot read it: {reason}") from error
    file = CsvFile(len(rows), [], Counter(), any("OVERLAP" in t for row in rows for t in row))
    for row, texts in enumerate(rows):
        for column, text in enumerate(t.strip() for t in texts):
            for part in _parts(text):
                if match := CELL.fullmatch(part):
                    file.cells.append(Cell(row, column, int(match[1]), match[2], int(match[3])))
                elif match := IGNORED.fullmatch(part):
                    file.ignored[match[1]] += 1
                else:
                    at = f"pipeline.schedule={path}: row {row + 1}, column {column + 1}"
                    raise ScheduleError(f"{at}: {text!r} {NO_UNIT}")
    if not file.cells:
        raise ScheduleError(f"pipeline.schedule={path}: the file has no units")
    last = max(cell.chunk for cell in file.cells), max(cell.microbatch for cell in file.cells)
    # A wrong number would make arrays of its size.
    if (last[0] + 1) * (last[1] + 1) > len(file.cells):
        raise ScheduleError(
            f"pipeline.schedule={path}: the last chunk is {last[0]} and the last microbatch "
            f"{last[1]}, but there are only {len(file.cells)} units"
        )
    return file


def _parts(text: str) -> list[str]:
    if not (match := OVERLAP.fullmatch(text)):
        return [text] if text else []
    parts = [part.strip() for part in match[1].split(";")]
    kinds = [CELL.fullmatch(part) for part in parts]
    is_pair = all(kinds) and len({kind[2] for kind in kinds if kind}) == len(kinds)
    return parts if is_pair else [text]


def to_csv(table: Table) -> str:
    # A lockstep tick has a column for W only if there are W units.
    width = (3 if "W" in table.kinds else 2) if table.lockstep else 1
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
    return read_cells(Path(path)).sizes


def load_csv(
    path: str | Path,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int | None = None,
    *,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """Read and validate a table.

    Args:
      num_stages, num_microbatches, num_repeats: sizes that the table must have.
      forwarding_delay, slack: as in `Table`; the file's ticks must leave room for them.

    Raises:
      ScheduleError: the file cannot be read, is for other sizes, or is not a valid schedule; names
        row, column and cell.
    """
    path = Path(path)
    file = read_cells(path)
    num_repeats = num_repeats or file.sizes[2]
    if file.sizes != (num_stages, num_microbatches, num_repeats):
        stages, microbatches, repeats = file.sizes
        raise ScheduleError(
            f"pipeline.schedule={path}: the file is for {stages} stages, {microbatches} "
            f"microbatches and {repeats} repeats, but mesh.ici.stage={num_stages}, "
            f"pipeline.num_microbatches={num_microbatches} and pipeline.num_repeats={num_repeats}"
        )
    placement = _placement(path, file)
    # A file with ticks must be valid as it is; an order gets the ticks that its inputs allow.
    if not file.is_order:
        table = _as_written(path, file, placement, forwarding_delay, slack)
        validate(table)
        return table
    if forwarding_delay > 1:
        raise ScheduleError(
            f"pipeline.delay_activation_forwarding=true: {path} is an order of units without "
            f"ticks, which has nothing to delay; set it to false"
        )
    orders: list[list[RawUnit]] = [[] for _ in range(num_stages)]
    for cell in file.cells:
        orders[cell.row].append((cell.kind, cell.microbatch, cell.chunk))
    timed = place(str(path), *file.sizes, orders, placement)
    table = replace(timed, name=path.stem, source=str(path), note=file.note(path))
    validate(table)
    return table


def _as_written(
    path: Path, file: CsvFile, placement: str, forwarding_delay: int, slack: int
) -> Table:
    """Return a table with every unit in the tick of its column, which need not be valid."""
    num_stages, num_microbatches, num_repeats = file.sizes
    # A lockstep tick has a column for each kind: if one cell is elsewhere, columns are ticks.
    lockstep = in_lockstep([(cell.column, cell.kind) for cell in file.cells])
    width = (3 if any(cell.kind == "W" for cell in file.cells) else 2) if lockstep else 1
    shape = (1 + max(cell.column for cell in file.cells) // width, num_stages)
    kinds = {"F", *(cell.kind for cell in file.cells)}
    if kinds == {"F"}:
        kinds.add("B")
    microbatch = {kind: np.full(shape, IDLE, np.int32) for kind in kinds}
    chunk = {kind: np.full(shape, IDLE, np.int32) for kind in kinds}
    for cell in file.cells:
        at = (cell.column // width, cell.row)
        microbatch[cell.kind][at] = cell.microbatch
        chunk[cell.kind][at] = cell.chunk // num_stages
    return Table(
        name=path.stem,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        microbatch=microbatch,
        chunk=chunk,
        placement=placement,
        lockstep=lockstep,
        forwarding_delay=forwarding_delay,
        slack=slack,
        source=str(path),
    )


def _placement(path: Path, file: CsvFile) -> str:
    """Return `loop` or `v`, whichever all cells agree with.

    Raises:
      ScheduleError: neither; names a cell that contradicts the placement that fits better.
    """
    num_stages, _, num_repeats = file.sizes
    strays = {}
    for placement in ("loop", "v"):
        stage = stages_of_chunks(num_stages, num_repeats, placement)
        strays[placement] = [(cell, stage) for cell in file.cells if stage[cell.chunk] != cell.row]
    placement = min(strays, key=lambda p: len(strays[p]))
    for cell, stage in strays[placement][:1]:
        raise ScheduleError(
            f"pipeline.schedule={path}: {cell} is on the wrong stage; chunk {cell.chunk} belongs "
            f"to row {1 + stage[cell.chunk]}"
        )
    return placement
