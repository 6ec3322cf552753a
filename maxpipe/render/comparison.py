"""Figures of several schedules, a row each."""

from collections.abc import Sequence

from maxpipe.config.catalog import SCHEDULES
from maxpipe.planning.simulate import Simulation

HEADER = (
    "schedule",
    "repeats",
    "makespan",
    "bubble",
    "of time",
    "peak in flight",
    "bytes sent",
    "runs on",
)
FOOTNOTE = "peak in flight: one microbatch's activations of a whole stage count as one"


def comparison_rows(runs: Sequence[Simulation]) -> list[tuple[str, ...]]:
    """A row under `HEADER` for every run, the shortest first."""
    rows: list[tuple[str, ...]] = []
    for run in sorted(runs, key=lambda run: run.makespan):
        table = run.table
        # What follows the name of a schedule says which stages it was drawn with.
        engines = () if table.source else SCHEDULES[table.name.partition(" ")[0]].engines
        rows.append(
            (
                table.name,
                str(table.num_repeats),
                f"{run.makespan:.5g}",
                f"{run.bubble:.4g}",
                f"{run.bubble_fraction:.1%}",
                f"{run.peak_in_flight.max() / table.num_repeats:.4g}",
                f"{run.bytes_sent.sum():g}",
                ", ".join(engines) or "-",
            )
        )
    return rows


def comparison_text(runs: Sequence[Simulation]) -> str:
    """The rows as aligned text; numbers to the right."""
    rows = [HEADER, *comparison_rows(runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
        lines.append("  ".join(cells))
    return "\n".join([*lines, "", FOOTNOTE]) + "\n"
