"""Find the schedule of the least makespan under a cap on activations in flight.

The search starts from every named schedule of these sizes that fits, and from list scheduling under
many policies; a tabu search improves the best of them, and CP-SAT proves a bound and improves them
further. So the result is never worse than a named schedule of the same form.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.improve import improve
from maxpipe.pipeline.schedules.list_scheduling import policies, schedule_units
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.order import place, stage_orders
from maxpipe.pipeline.schedules.table import Table, from_ticks
from maxpipe.pipeline.schedules.throttled import throttled
from maxpipe.pipeline.schedules.timed_orders import Orders, UnitTimes, Workload
from maxpipe.pipeline.schedules.validate import validate
from maxpipe.planning.simulate import Costs, Simulation, simulate

NAME = "solved"
STARTS = 4  # orders that the tabu search improves
UNITS_TIMED = 600_000  # by the tabu search, from each of them
# Called with the seconds since the start, the best makespan and the bound.
Progress = Callable[[float, float, float], None]


@dataclass(frozen=True)
class Task:
    """What to solve.

    Attributes:
      num_stages, num_microbatches, num_repeats, placement, lockstep: see `Table`.
      max_in_flight: chunks that may be in flight on a stage, at least `num_repeats`.
      costs: times of units of one chunk.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    placement: str
    lockstep: bool
    max_in_flight: int
    costs: Costs

    @property
    def workload(self) -> Workload:
        """Return the task as the search takes it."""
        forward, backward, gradient, weight = (
            tuple(self.costs.of(kind, self.num_stages).tolist()) for kind in "FBIW"
        )
        times = UnitTimes(
            forward, backward, gradient, weight, self.costs.communication, self.costs.head
        )
        sizes = self.num_stages, self.num_microbatches, self.num_repeats
        return Workload(*sizes, self.placement, times, self.max_in_flight)

    def fits(self, run: Simulation) -> bool:
        """Return whether no stage has more chunks in flight than it may."""
        return bool(run.peak_in_flight.max() <= self.max_in_flight)


@dataclass(frozen=True)
class Solution:
    """What was found.

    Attributes:
      run: the best schedule.
      bound: a makespan that no schedule of this form can beat.
      named: the named schedules that fit, by makespan.
      exact: whether CP-SAT searched.
    """

    run: Simulation
    bound: float
    named: list[Simulation]
    exact: bool

    @property
    def is_optimal(self) -> bool:
        """Return whether the bound is reached, but for rounding."""
        return self.run.makespan <= self.bound * (1 + 1e-6) + 1e-9


def solve(task: Task, seconds: float, progress: Progress) -> Solution:
    """Search for a time, or until the best schedule is proved.

    Args:
      task: sizes, times and memory.
      seconds: of search; 0 for the heuristics alone, which take as long as they take.
      progress: called when there is something new.
    """
    begin = time.monotonic()
    named = sorted(_named(task), key=lambda run: run.makespan)
    report = _since(begin, progress)
    exact = seconds > 0 and find_spec("ortools") is not None
    search = _solve_lockstep if task.lockstep else _solve_free
    table, bound = search(task, named, seconds if exact else 0.0, report)
    validate(table)
    run = simulate(table, task.costs)
    assert task.fits(run)
    same_form = [other for other in named if other.table.lockstep == task.lockstep]
    if same_form and same_form[0].makespan < run.makespan:  # by a loss spread over the stages
        run = simulate(replace(same_form[0].table, name=NAME), task.costs)
    return Solution(run, min(bound, run.makespan), named, exact)


def _since(begin: float, progress: Progress) -> Progress:
    def report(_: float, makespan: float, bound: float) -> None:
        progress(time.monotonic() - begin, makespan, bound)

    return report


def _named(task: Task) -> Iterator[Simulation]:
    """Yield the named schedules of a task's sizes and placement that fit its memory."""
    for name, facts in SCHEDULES.items():
        if facts.repeats_for(task.num_repeats) != task.num_repeats:
            continue
        table = load_schedule(name, task.num_stages, task.num_microbatches, task.num_repeats)
        if table.placement != task.placement or (task.lockstep and not table.lockstep):
            continue
        run = simulate(table, task.costs)
        if task.fits(run):
            yield run


def _solve_free(
    task: Task, named: list[Simulation], seconds: float, progress: Progress
) -> tuple[Table, float]:
    workload = task.workload
    bound = workload.lower_bound()
    starts = [workload.orders(stage_orders(run.table)) for run in named]
    starts = [orders for orders in starts if workload.fits(orders)]
    starts += [
        schedule_units(workload, policy)
        for whole in (False, True)
        for policy in policies(workload, whole)
    ]
    starts = sorted(set(starts), key=lambda orders: _makespan(workload, orders))[:STARTS]
    best = starts[0]
    progress(0, _makespan(workload, best), bound)
    for orders in starts:
        improved = improve(workload, orders, UNITS_TIMED // (3 * workload.num_pairs))
        best = min(best, improved, key=lambda orders: _makespan(workload, orders))
        progress(0, _makespan(workload, best), bound)
    if seconds and _makespan(workload, best) > bound + 1e-9:
        from maxpipe.planning.cp_sat import solve_exactly  # an extra, slow to import

        best, bound = solve_exactly(workload, best, seconds, progress)
    sizes = task.num_stages, task.num_microbatches, task.num_repeats
    return place(NAME, *sizes, workload.raw(best), task.placement), bound


def _makespan(workload: Workload, orders: Orders) -> float:
    timing = workload.time(orders)
    assert timing is not None, "the orders contradict each other"
    return timing.makespan


def _solve_lockstep(
    task: Task, named: list[Simulation], seconds: float, progress: Progress
) -> tuple[Table, float]:
    sizes = task.num_stages, task.num_microbatches, task.num_repeats
    runs = [*named]
    for splits in (False, True):
        table = throttled(NAME, *sizes, task.placement, task.max_in_flight, splits)
        runs.append(simulate(table, task.costs))
    bounds: list[float] = []
    for splits in (False, True):
        seed = min(
            (run for run in runs if ("W" in run.table.kinds) == splits), key=lambda r: r.makespan
        )
        kinds = "FIW" if splits else "FB"
        slots = {kind: float(task.costs.of(kind, task.num_stages).max()) for kind in kinds}
        bounds.append(_tick_bound(task, slots))
        if seconds and seed.makespan > bounds[-1] + 1e-9:
            ticks, proved = _solve_ticks(task, seed, slots, seconds / 2, progress)
            bounds[-1] = max(bounds[-1], proved)
            if ticks is not None:
                runs.append(simulate(ticks, task.costs))
    best = min((run for run in runs if task.fits(run)), key=lambda run: run.makespan)
    progress(0, best.makespan, min(bounds))
    return replace(best.table, name=NAME), min(bounds)


def _tick_bound(task: Task, slots: dict[str, float]) -> float:
    """Return a makespan that no lockstep table can beat, from the least span of each kind."""
    least = task.num_microbatches * task.num_repeats
    ring = task.num_stages - 1
    spans = {kind: least + (0 if kind == "W" else ring) for kind in slots}
    work = sum(slots[kind] * span for kind, span in spans.items())
    transfers = task.costs.communication * (least + ring - 1) if ring else 0.0
    return work + transfers + task.costs.head * task.num_microbatches / task.num_stages


def _solve_ticks(
    task: Task, seed: Simulation, slots: dict[str, float], seconds: float, progress: Progress
) -> tuple[Table | None, float]:
    from maxpipe.planning.cp_sat import scale_of  # an extra, slow to import
    from maxpipe.planning.cp_sat_lockstep import SlotTimes, solve_ticks

    communication = task.costs.communication if task.num_stages > 1 else 0.0
    times = SlotTimes(
        slots, communication, task.costs.head * task.num_microbatches / task.num_stages
    )
    scale = scale_of([*slots.values(), communication])
    ticks, bound = solve_ticks(
        seed.table, times, seed.makespan, task.max_in_flight, scale, seconds, progress
    )
    if ticks is None:
        return None, bound
    first = min(int(np.min(array)) for array in ticks.values())
    shifted = {kind: array - first for kind, array in ticks.items()}
    table = from_ticks(
        NAME,
        task.num_stages,
        task.num_repeats,
        shifted,
        placement=task.placement,
        lockstep=True,
    )
    return table, bound
