"""Simulate pipeline schedules in Python; they draw themselves in a notebook. Imports no JAX."""

from collections.abc import Sequence
from html import escape
from os import PathLike, fspath
from typing import overload

from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.plan.simulate import Simulation
from maxpipe.render.chart import chart_svg, fit_frame
from maxpipe.render.schedule_request import simulate_words
from maxpipe.render.schedule_text import FOOTNOTES, comparison_text, figures_html, render_terminal

_COLUMNS = 120  # width of a schedule's text
Value = str | float | bool | Sequence[float]


class Schedules(Sequence[Simulation]):
    """Simulated schedules; each has `table`, `makespan`, `bubble_fraction`, `peak_in_flight`.

    `bubble_fraction` is the idle share of all stages' time, from a step's first unit to its last.

    `print` shows them as text, and a notebook as charts on one time scale.

    Args:
      runs: one or more simulated schedules.
      subtitle: sizes and costs, in words.
    """

    def __init__(self, runs: Sequence[Simulation], subtitle: str):
        self._runs = tuple(runs)
        self._subtitle = subtitle

    @overload
    def __getitem__(self, index: int) -> Simulation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Simulation]: ...
    def __getitem__(self, index: int | slice) -> Simulation | Sequence[Simulation]:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        if len(self) > 1:
            return comparison_text(self._runs).rstrip()
        return render_terminal(self._runs[0], colour=False, width=_COLUMNS).rstrip()

    def to_csv(self) -> str:
        """Return the only schedule's table as CSV, for a file that `pipeline.schedule` names.

        Raises:
          ValueError: there are several schedules.
        """
        if len(self) > 1:
            raise ValueError("to_csv: name one schedule; a file holds no more")
        return to_csv(self._runs[0].table)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: a chart of each, after a table if there are several."""
        frame = fit_frame([*self._runs])
        charts = [
            f'<div style="overflow-x:auto">{chart_svg(run, frame)}</div>' for run in self._runs
        ]
        if len(self) == 1:
            return charts[0]
        notes = "; ".join([*FOOTNOTES, escape(self._subtitle)])
        return "\n".join([f"{figures_html(self._runs)}<p>{notes}</p>", *charts])


def schedule(*names: str | PathLike[str], **options: Value) -> Schedules:
    """Simulate pipeline schedules, as `python -m maxpipe.schedule` does.

    Args:
      *names: names in the catalogue, such as "lockstep_1f1b", or CSV files.
      **options: sizes and times as on the command line, such as stages=4, microbatches=8,
        repeats=2, backward=2.2 or forward=[1, 1, 1, 1.3], one time for each stage.

    Returns:
      The simulated tables, in the order of the names.

    Raises:
      ValueError: a name or an option does not exist, or conflicts with the others.
    """
    words = [fspath(name) for name in names]
    words += [f"{key}={_word(value)}" for key, value in options.items()]
    return Schedules(*simulate_words(words))


def _word(value: Value) -> str:
    """Return an option as it is written on the command line."""
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):  # an array or number of NumPy
        value = value.tolist()
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, Sequence) else str(value)
