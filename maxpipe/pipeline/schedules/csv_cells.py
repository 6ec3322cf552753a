"""Parse the cells of a CSV file: units, and what torch writes besides them."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from maxpipe.pipeline.schedules.order import RawUnit
from maxpipe.pipeline.schedules.table import ScheduleError

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
NO_UNIT = "is not a unit: global chunk, F, B, I or W, microbatch, as in 2F0; an empty cell is idle"
IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
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

    @property
    def unit(self) -> RawUnit:
        return self.kind, self.microbatch, self.chunk


class CsvFile(NamedTuple):
    """A file.

    Attributes:
      num_rows: number of rows, one per stage.
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
        """Return how the file was read, if not cell by cell."""
        if not self.is_order:
            return ""
        pairs = "cells with two units"
        reason = f"it has {pairs if self.has_overlaps else 'no idle cells between units'}"
        if self.ignored:
            number = sum(self.ignored.values())
            what = "cell is" if number == 1 else "cells are"
            reason = (
                f"the engines place transfers, gathers and reductions themselves, so {number} "
                f"{what} ignored ({', '.join(sorted(self.ignored))})"
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
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        if isinstance(error, csv.Error):
            reason = str(error)
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
    _check_size(path, file)
    return file


def _check_size(path: Path, file: CsvFile) -> None:
    """Raise ScheduleError before memory is allocated for a table that cannot be valid."""
    chunk = max(file.cells, key=lambda cell: cell.chunk)
    microbatch = max(file.cells, key=lambda cell: cell.microbatch)
    num_units = (chunk.chunk + 1) * (microbatch.microbatch + 1)
    if num_units > len(file.cells):
        raise ScheduleError(
            f"pipeline.schedule={path}: {chunk} and {microbatch} are the last chunk and the last "
            f"microbatch, so there must be {num_units} units of each kind; the file has "
            f"{len(file.cells)} in all"
        )
    if file.num_rows * (1 + max(cell.column for cell in file.cells)) > MAX_SLOTS:
        raise ScheduleError(f"pipeline.schedule={path}: more than {MAX_SLOTS} cells are too many")


def _parts(text: str) -> list[str]:
    if not (match := OVERLAP.fullmatch(text)):
        return [text] if text else []
    parts = [part.strip() for part in match[1].split(";")]
    kinds = [CELL.fullmatch(part) for part in parts]
    is_pair = all(kinds) and len({kind[2] for kind in kinds if kind}) == len(kinds)
    return parts if is_pair else [text]
