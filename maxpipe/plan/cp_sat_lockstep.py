"""Find the lockstep table with the least makespan, and a bound on it, with OR-Tools' CP-SAT.

From a kind's first unit to its last, every tick computes the slot of that kind on all stages. So
the makespan is the sum over kinds of this span, in ticks, times the slot's time. Microbatches are
alike, so their order is fixed, as in `maxpipe.plan.cp_sat`.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from maxpipe.pipeline.schedules.table import Table, stages_of_chunks
from maxpipe.plan.cp_sat import Report
from maxpipe.plan.solver_task import Progress

Ticks = dict[str, np.ndarray]


class SlotTimes(NamedTuple):
    """Times of the slots of a tick.

    Attributes:
      slots: time of each kind of unit in the table: `F` and `B`, or `F`, `I` and `W`.
      communication: time of the transfers of a tick; 0 with one stage.
      head: time of the loss of all microbatches.
    """

    slots: Mapping[str, float]
    communication: float
    head: float


class TickModel:
    """A CP-SAT model of the ticks of all units.

    Args:
      seed: the table that the search starts from; it sets sizes, placement and kinds.
      times: times of the slots.
      max_in_flight: chunks that may be in flight on a stage.
      scale: the model's units per unit of time.
    """

    def __init__(self, seed: Table, times: SlotTimes, max_in_flight: int, scale: int) -> None:
        self.seed = seed
        self.model = cp_model.CpModel()
        self.horizon = seed.num_ticks
        self.stage_of = stages_of_chunks(seed.num_stages, seed.num_repeats, seed.placement)
        shape = (seed.num_microbatches, seed.num_chunks)
        self.ticks = {
            kind: [[self._variable() for _ in range(shape[1])] for _ in range(shape[0])]
            for kind in times.slots
        }
        for kind, rows in self.ticks.items():
            for row, hint in zip(rows, seed.ticks[kind].tolist(), strict=True):
                for variable, tick in zip(row, hint, strict=True):
                    self.model.add_hint(variable, tick)
        self._connect()
        for stage in range(seed.num_stages):
            self._fill_stage(stage, max_in_flight)
        self.model.minimize(self._makespan(times, scale))

    def _variable(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _connect(self) -> None:
        """Order the units within each microbatch, and the microbatches."""
        add, last = self.model.add, self.seed.num_chunks - 1
        backward = self.ticks["I" if "I" in self.ticks else "B"]
        for microbatch, row in enumerate(self.ticks["F"]):
            for chunk in range(last):
                add(row[chunk + 1] >= row[chunk] + 1)
                add(backward[microbatch][chunk] >= backward[microbatch][chunk + 1] + 1)
            add(backward[microbatch][last] >= row[last])
            if "W" in self.ticks:
                for w, i in zip(self.ticks["W"][microbatch], backward[microbatch], strict=True):
                    add(w >= i)
        for rows in self.ticks.values():
            for now, later in pairwise(rows):
                for a, b in zip(now, later, strict=True):
                    add(b >= a + 1)

    def _fill_stage(self, stage: int, max_in_flight: int) -> None:
        """Let a stage run one unit of a kind in a tick, with no more in flight than allowed."""
        chunks = np.flatnonzero(self.stage_of == stage).tolist()
        for rows in self.ticks.values():
            self.model.add_all_different([row[chunk] for row in rows for chunk in chunks])
        pairs = [(m, chunk) for m in range(self.seed.num_microbatches) for chunk in chunks]
        if max_in_flight >= len(pairs):
            return
        release = self.ticks["W" if "W" in self.ticks else "B"]
        lives = []
        for microbatch, chunk in pairs:
            size = self._variable()
            start, end = self.ticks["F"][microbatch][chunk], release[microbatch][chunk] + 1
            lives.append(self.model.new_interval_var(start, size, end, ""))
        self.model.add_cumulative(lives, [1] * len(lives), max_in_flight)

    def _makespan(self, times: SlotTimes, scale: int) -> cp_model.LinearExpr:
        """Return the makespan without the head; times are rounded down."""
        terms = []
        stops = {}
        for kind, rows in self.ticks.items():
            first, last = self._variable(), self._variable()
            self.model.add_min_equality(first, [v for row in rows for v in row])
            self.model.add_max_equality(last, [v for row in rows for v in row])
            terms.append(int(times.slots[kind] * scale + 1e-6) * (last - first + 1))
            # A stage has all its units of a kind in this span, and the last stage starts later.
            least = self.seed.num_microbatches * self.seed.num_repeats
            ring = 0 if kind == "W" else self.seed.num_stages - 1
            self.model.add(last - first + 1 >= least + ring)
            stops[kind] = last
        # Every tick up to the last I or B ends with transfers; those of the last one delay nothing.
        sends = stops["I" if "I" in stops else "B"]
        trailing = self.model.new_bool_var("")
        if "W" in stops:
            self.model.add(stops["W"] <= sends).only_enforce_if(~trailing)
        terms.append(int(times.communication * scale + 1e-6) * (sends + trailing))
        return cp_model.LinearExpr.sum(terms)

    def values(self, value: cp_model.CpSolver) -> Ticks:
        """Return the tick of every unit of a solution, int [M, G] for each kind."""
        return {
            kind: np.array([[value.value(v) for v in row] for row in rows])
            for kind, rows in self.ticks.items()
        }


def solve_ticks(
    seed: Table,
    times: SlotTimes,
    makespan: float,
    max_in_flight: int,
    scale: int,
    seconds: float,
    progress: Progress,
) -> tuple[Ticks | None, float]:
    """Return the ticks of the best table found, and a bound that no table can beat.

    Args:
      seed: a table that fits the memory, with the kinds that `times` names.
      times: times of the slots.
      makespan: makespan of the seed.
      max_in_flight: chunks that may be in flight on a stage.
      scale: the model's units per unit of time.
      seconds: time limit.
      progress: function called with the best makespan and bound so far.
    """
    model = TickModel(seed, times, max_in_flight, scale)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    report = Report(scale, makespan, progress, offset=times.head)
    solver.best_bound_callback = report.on_bound
    status = solver.solve(model.model, report)
    bound = solver.best_objective_bound / scale + times.head
    is_solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return (model.values(solver) if is_solved else None), bound
