"""Find the schedule with the least makespan, and a bound on it, with OR-Tools' CP-SAT.

Microbatches are alike, so some best order has, on every stage, the units of each kind and chunk in
the order of microbatches: whatever their order, the k-th input to arrive can be labelled microbatch
k. The models impose this order, which makes the search much smaller.

Of orders of units times are whole numbers in the model. They are rounded down, so that its bound
holds for the given times; the order that it finds is timed with the given ones. Lockstep tables
compute, from a kind's first unit to its last, the slot of that kind on all stages in every tick. So
their makespan is the sum over kinds of this span, in ticks, times the slot's time.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from maxpipe.pipeline.schedules.table import Table, stages_of_chunks
from maxpipe.pipeline.schedules.timed_orders import TOLERANCE, Orders, Timing, Workload
from maxpipe.plan.solve import Progress

MAX_SCALE = 10_000


@dataclass(frozen=True)
class Backward:
    """The backward of a pair in the model: an I with a W, or a B.

    Attributes:
      start: start of the I or B.
      end: end of the I or B.
      weight: start of the W, or of the B if there is no W.
      release: time from which the pair is no longer in flight.
      is_whole: true if it is a B; None if it can never be one.
    """

    start: cp_model.IntVar
    end: cp_model.LinearExprT
    weight: cp_model.IntVar
    release: cp_model.LinearExprT
    is_whole: cp_model.IntVar | None


class OrderModel:
    """A CP-SAT model of a workload.

    Args:
      workload: the units to order.
      horizon: a makespan that some order is known to reach.
    """

    def __init__(self, workload: Workload, horizon: float) -> None:
        self.workload = workload
        self.scale = scale_of([*workload.durations, *workload.whole_durations, *workload.delays])
        self.horizon = int(horizon * self.scale + 1)
        self.model = cp_model.CpModel()
        self.makespan = self._variable("makespan")
        pairs = range(workload.num_pairs)
        self.forward = [self._variable(f"F{p}") for p in pairs]
        self.backward = [self._add_backward(pair) for pair in pairs]
        self._order_microbatches()
        for chunk in range(1, workload.num_chunks):
            self._connect(chunk)
        for stage in range(workload.num_stages):
            self._fill_stage(stage)
        self.model.add(self.makespan >= self.length(workload.lower_bound()))
        self.model.minimize(self.makespan)

    def length(self, time: float) -> int:
        """Return a time in the model's units, rounded down."""
        return int(time * self.scale + TOLERANCE * self.scale)

    def _variable(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _lengths(self, pair: int) -> tuple[int, int, int, int]:
        """Return the lengths of a pair's F, I, W and B."""
        workload, pairs = self.workload, self.workload.num_pairs
        return (
            self.length(workload.durations[pair]),
            self.length(workload.durations[pairs + pair]),
            self.length(workload.durations[2 * pairs + pair]),
            self.length(workload.whole_durations[pair]),
        )

    def _add_backward(self, pair: int) -> Backward:
        model = self.model
        _, i, w, b = self._lengths(pair)
        start, weight = self._variable(f"I{pair}"), self._variable(f"W{pair}")
        if b >= i + w:  # an I and then its W take no longer, and the gradient is ready earlier
            model.add(weight >= start + i)
            return Backward(start, start + i, weight, weight + w, None)
        is_whole = model.new_bool_var(f"B{pair}")
        end, release = self._variable(f"end{pair}"), self._variable(f"release{pair}")
        model.add(end == start + i + (b - i) * is_whole)
        model.add(weight >= end).only_enforce_if(~is_whole)
        model.add(weight == start).only_enforce_if(is_whole)
        model.add(release == weight + w).only_enforce_if(~is_whole)
        model.add(release == end).only_enforce_if(is_whole)
        return Backward(start, end, weight, release, is_whole)

    def _order_microbatches(self) -> None:
        chunks = self.workload.num_chunks
        for pair in range(self.workload.num_pairs - chunks):
            f, _, w, _ = self._lengths(pair)
            now, later = self.backward[pair], self.backward[pair + chunks]
            self.model.add(self.forward[pair + chunks] >= self.forward[pair] + f)
            self.model.add(later.start >= now.end)
            splits = [x.is_whole for x in (now, later) if x.is_whole is not None]
            order = self.model.add(later.weight >= now.weight + w)
            if splits:
                order.only_enforce_if(*(~literal for literal in splits))

    def _connect(self, chunk: int) -> None:
        """Connect a chunk with the one before it."""
        workload, chunks = self.workload, self.workload.num_chunks
        is_far = workload.stage_of[chunk] != workload.stage_of[chunk - 1]
        delay = self.length(workload.times.communication) if is_far else 0
        for pair in range(chunk, workload.num_pairs, chunks):
            before, after = self.backward[pair], self.backward[pair - 1]
            f = self._lengths(pair - 1)[0]
            self.model.add(self.forward[pair] >= self.forward[pair - 1] + f + delay)
            self.model.add(after.start >= before.end + delay)
            if chunk == chunks - 1:
                self.model.add(before.start >= self.forward[pair] + self._lengths(pair)[0])

    def _fill_stage(self, stage: int) -> None:
        """Let a stage run one unit at a time, with no more in flight than allowed."""
        model, workload = self.model, self.workload
        pairs = [
            pair
            for pair in range(workload.num_pairs)
            if workload.stage_of[pair % workload.num_chunks] == stage
        ]
        units, lives = [], []
        for pair in pairs:
            f, i, w, b = self._lengths(pair)
            backward = self.backward[pair]
            units.append(model.new_fixed_size_interval_var(self.forward[pair], f, ""))
            if backward.is_whole is None:
                units.append(model.new_fixed_size_interval_var(backward.start, i, ""))
                units.append(model.new_fixed_size_interval_var(backward.weight, w, ""))
            else:
                for start, length, present in (
                    (backward.start, i, ~backward.is_whole),
                    (backward.weight, w, ~backward.is_whole),
                    (backward.start, b, backward.is_whole),
                ):
                    units.append(
                        model.new_optional_fixed_size_interval_var(start, length, present, "")
                    )
            lives.append((self.forward[pair], backward.release))
            model.add(self.makespan >= backward.release)
        model.add_no_overlap(units)
        if workload.max_in_flight >= len(pairs):
            return
        if workload.num_repeats == 1 and all(self.backward[p].is_whole is None for p in pairs):
            for (_, release), (start, _) in zip(
                lives, lives[workload.max_in_flight :], strict=False
            ):
                model.add(start >= release)
            return
        intervals = []
        for start, release in lives:
            size = self._variable("")
            intervals.append(model.new_interval_var(start, size, release, ""))
        model.add_cumulative(intervals, [1] * len(intervals), workload.max_in_flight)

    def hint(self, orders: Orders, timing: Timing) -> None:
        pairs = self.workload.num_pairs
        for pair, backward in enumerate(self.backward):
            self._hint(self.forward[pair], timing.start[pair])
            self._hint(backward.start, timing.start[pairs + pair])
            is_whole = pair in orders.whole
            weight = pairs + pair if is_whole else 2 * pairs + pair
            self._hint(backward.weight, timing.start[weight])
            if backward.is_whole is not None:
                self.model.add_hint(backward.is_whole, is_whole)

    def _hint(self, variable: cp_model.IntVar, time: float) -> None:
        self.model.add_hint(variable, self.length(time))

    def orders(self, value: Callable[[cp_model.LinearExprT], int]) -> Orders:
        workload, pairs = self.workload, self.workload.num_pairs
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(workload.num_stages)]
        whole = set()
        for pair, backward in enumerate(self.backward):
            row = rows[workload.stage(pair)]
            row.append((value(self.forward[pair]), 0, pair))
            row.append((value(backward.start), 1, pairs + pair))
            if backward.is_whole is not None and value(backward.is_whole):
                whole.add(pair)
            else:
                row.append((value(backward.weight), 2, 2 * pairs + pair))
        return Orders(tuple(tuple(u for *_, u in sorted(r)) for r in rows), frozenset(whole))


class Report(cp_model.CpSolverSolutionCallback):
    """Report each better solution and each better bound.

    Args:
      scale: the model's units per unit of time.
      makespan: makespan of the best order so far.
      progress: function to report to, see `Progress`.
      offset: time to add to the model's makespans and bounds.
    """

    def __init__(
        self, scale: int, makespan: float, progress: Progress, offset: float = 0.0
    ) -> None:
        super().__init__()
        self._begin = time.monotonic()
        self._scale = scale
        self._offset = offset
        self._best = makespan
        self._bound = 0.0
        self._progress = progress

    def on_solution_callback(self) -> None:
        self._best = min(self._best, self.objective_value / self._scale + self._offset)
        self._tell()

    def on_bound(self, bound: float) -> None:
        self._bound = bound / self._scale + self._offset
        self._tell()

    def _tell(self) -> None:
        self._progress(time.monotonic() - self._begin, self._best, self._bound)


def solve_exactly(
    workload: Workload, orders: Orders, seconds: float, progress: Progress
) -> tuple[Orders, float]:
    """Return the best orders found within a time limit, and a bound that no order can beat.

    Args:
      workload: the units to order.
      orders: orders that the search starts from.
      progress: function called with the best makespan and bound so far.
    """
    timing = workload.time(orders)
    assert timing is not None
    model = OrderModel(workload, timing.makespan)
    model.hint(orders, timing)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    report = Report(model.scale, timing.makespan, progress)
    solver.best_bound_callback = report.on_bound
    status = solver.solve(model.model, report)
    bound = max(workload.lower_bound(), solver.best_objective_bound / model.scale)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solved = model.orders(solver.value)
        solved_timing = workload.time(solved)
        if solved_timing and workload.fits(solved) and solved_timing.makespan < timing.makespan:
            return solved, min(bound, solved_timing.makespan)
    return orders, min(bound, timing.makespan)


def scale_of(times: list[float]) -> int:
    """Return the model's units per unit of time: few that make all times whole, else many."""
    for scale in (step * 10**power for power in range(6) for step in (1, 2, 5)):
        if all(abs(time * scale - round(time * scale)) < 1e-7 for time in times):
            return scale
    return MAX_SCALE


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
      max_in_flight: chunks that may be in flight on a stage.
      scale: the model's units per unit of time.
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
