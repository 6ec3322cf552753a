"""Find the schedule with the least makespan under a cap on activations in flight.

The search starts from every named schedule of these sizes that fits, and from list scheduling under
many policies; a tabu search improves the best of them, and CP-SAT proves a bound and improves them
further. So the result is never worse than a named schedule. Both forms of tables are searched where
either may be faster: lockstep ones spread the loss over the stages.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.imports import is_installed
from maxpipe.pipeline.schedules.improve import improve
from maxpipe.pipeline.schedules.list_scheduling import policies, schedule_units
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.lockstep import throttled
from maxpipe.pipeline.schedules.order import place, stage_orders
from maxpipe.pipeline.schedules.table import Table, from_ticks
from maxpipe.pipeline.schedules.timed_orders import Orders, Workload
from maxpipe.pipeline.schedules.validate import validate
from maxpipe.plan.simulate import COST_FIELDS, Costs, Simulation, simulate

NAME = "solved"  # name of the tables that it finds
_TIMES = (*COST_FIELDS.values(), "communication", "head")
# Called with the seconds since the start, the best makespan and the bound.
Progress = Callable[[float, float, float], None]


@dataclass(frozen=True)
class Task:
    """What to solve.

    Attributes:
      num_stages, num_microbatches, num_repeats, placement: see `Table`.
      lockstep: whether the table is in lockstep; None for whichever is faster.
      max_in_flight: chunks that may be in flight on a stage, at least `num_repeats`.
      costs: times of units of one chunk.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    placement: str
    lockstep: bool | None
    max_in_flight: int
    costs: Costs

    @property
    def workload(self) -> Workload:
        sizes = self.num_stages, self.num_microbatches, self.num_repeats
        times = self.costs.unit_times(self.num_stages, self.num_repeats, self.placement)
        return Workload(*sizes, self.placement, times, self.max_in_flight)

    @property
    def unit_of_time(self) -> float:
        """Return a power of ten such that the longest of all times is 1 to 10 of it."""
        longest = max(float(np.max(getattr(self.costs, name))) for name in _TIMES)
        return 10.0 ** math.floor(math.log10(longest)) if longest else 1.0

    def in_unit(self, unit: float) -> "Task":
        """Return the task with times in another unit; the search compares them up to rounding."""
        times = {name: (np.asarray(getattr(self.costs, name)) / unit).tolist() for name in _TIMES}
        return replace(self, costs=replace(self.costs, **times))

    def fits(self, run: Simulation) -> bool:
        return bool(run.peak_in_flight.max() <= self.max_in_flight)


def solve_lockstep(
    task: Task, named: list[Simulation], seconds: float, exact: bool, progress: Progress
) -> tuple[Table, float, bool]:
    """Return the best lockstep table, a makespan that none can beat, and `exact`.

    Tables with B and tables with I and W are searched one after the other.

    Args:
      task: sizes, times and memory.
      named: the named lockstep schedules that fit.
      seconds: time limit of CP-SAT.
      exact: whether CP-SAT searches; otherwise the best known table is returned.
      progress: function called with the best makespan and bound so far.
    """
    sizes = task.num_stages, task.num_microbatches, task.num_repeats
    runs = [*named]
    for splits in (False, True):
        table = throttled(NAME, *sizes, task.placement, task.max_in_flight, splits)
        runs.append(simulate(table, task.costs))
    slots = [
        {kind: float(task.costs.of(kind, task.num_stages).max()) for kind in kinds}
        for kinds in ("FB", "FIW")
    ]
    bounds = [_tick_bound(task, each) for each in slots]

    def report(passed: float, makespan: float, proved: float) -> None:
        fastest = min(makespan, *(run.makespan for run in runs))
        progress(passed, fastest, min(max(proved, bounds[splits]), bounds[not splits], fastest))

    for splits in (False, True):
        seed = min(
            (run for run in runs if ("W" in run.table.kinds) == splits), key=lambda r: r.makespan
        )
        if exact and seed.makespan > bounds[splits] + 1e-9:
            ticks, proved = _solve_ticks(task, seed, slots[splits], seconds / 2, report)
            bounds[splits] = max(bounds[splits], proved)
            if ticks is not None:
                runs.append(simulate(ticks, task.costs))
    best = min((run for run in runs if task.fits(run)), key=lambda run: run.makespan)
    progress(0, best.makespan, min(bounds))
    return replace(best.table, name=NAME), min(bounds), exact


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
    from maxpipe.plan.cp_sat import SlotTimes, scale_of, solve_ticks  # an extra, slow to import

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


FREE, LOCKSTEP = "free-running", "lockstep"
STARTS = 4  # orders that the tabu search improves
HEURISTICS = 1 / 3  # share of the time, at most, before CP-SAT
UNITS_TIMED = 600_000  # units that the tabu search times from each of these orders


@dataclass(frozen=True)
class Solution:
    """The result of a search.

    Attributes:
      run: the best schedule, simulated.
      bound: a makespan that no schedule of the searched forms can beat.
      named: the named schedules of these forms that fit, by makespan.
      exact: whether CP-SAT searched wherever heuristics did not reach the bound.
      forms: forms of the tables that were searched, in words.
    """

    run: Simulation
    bound: float
    named: list[Simulation]
    exact: bool
    forms: str

    @property
    def is_optimal(self) -> bool:
        return self.run.makespan <= self.bound * (1 + 1e-6)


def solve(task: Task, seconds: float, progress: Progress) -> Solution:
    """Search until the time limit, or until the best schedule is proved optimal.

    Args:
      task: sizes, times and memory.
      seconds: time limit of the search; 0 for the heuristics alone, without a limit.
      progress: function called with the best makespan and bound so far.
    """
    unit = task.unit_of_time

    def report(passed: float, makespan: float, bound: float) -> None:
        progress(passed, makespan * unit, bound * unit)

    solution = _solve(task.in_unit(unit), seconds, report)
    run, *named = (simulate(run.table, task.costs) for run in (solution.run, *solution.named))
    return replace(solution, run=run, bound=min(solution.bound * unit, run.makespan), named=named)


def _solve(task: Task, seconds: float, progress: Progress) -> Solution:
    """Do what `solve` does, for times that are neither tiny nor huge."""
    if task.lockstep is None:
        return _solve_forms(task, seconds, progress)
    begin = time.monotonic()
    named = sorted(_named(task), key=lambda run: run.makespan)
    report = _since(begin, progress)
    exact = seconds > 0 and is_installed("ortools")
    search = solve_lockstep if task.lockstep else _solve_free
    table, bound, exact = search(task, named, seconds, exact, report)
    validate(table)
    run = simulate(table, task.costs)
    assert task.fits(run)
    forms = LOCKSTEP if task.lockstep else FREE
    return Solution(run, min(bound, run.makespan), named, exact, forms)


def _solve_forms(task: Task, seconds: float, progress: Progress) -> Solution:
    """Return the faster of a free-running and a lockstep table.

    Where the loss takes no time, ticks only delay units. No engine runs them in V placement.
    """
    free = replace(task, lockstep=False)
    if not task.costs.head or task.placement != "loop":
        return _solve(free, seconds, progress)
    begin, fastest, least = time.monotonic(), math.inf, math.inf

    def report(_: float, makespan: float, bound: float) -> None:
        nonlocal fastest
        fastest = min(fastest, makespan)
        progress(time.monotonic() - begin, fastest, min(bound, least, fastest))

    # There are fewer lockstep tables, and most tasks are solved in a short time.
    in_lockstep = _solve(replace(task, lockstep=True), seconds / 2, report)
    least = in_lockstep.bound
    running_free = _solve(free, seconds / 2, report)
    return replace(
        min(running_free, in_lockstep, key=lambda solution: solution.run.makespan),
        bound=min(in_lockstep.bound, running_free.bound),
        exact=in_lockstep.exact and running_free.exact,
        named=sorted(in_lockstep.named + running_free.named, key=lambda run: run.makespan),
        forms=f"{FREE} or {LOCKSTEP}",
    )


def _since(begin: float, progress: Progress) -> Progress:
    def report(_: float, makespan: float, bound: float) -> None:
        progress(time.monotonic() - begin, makespan, bound)

    return report


def _named(task: Task) -> Iterator[Simulation]:
    """Yield the named schedules of a task's sizes, placement and form that fit its memory.

    Without a head the order of a lockstep table may also run freely, in no more time. With a head
    the lockstep table spreads it over the stages, which no free-running table does.
    """
    forms = (True,) if task.lockstep else (False,) if task.costs.head else (False, True)
    sizes = task.num_stages, task.num_microbatches, task.num_repeats
    for name, facts in SCHEDULES.items():
        if facts.repeats_for(task.num_repeats) != task.num_repeats:
            continue
        table = load_schedule(name, *sizes)
        if table.placement != task.placement or table.lockstep not in forms:
            continue
        runs = [simulate(table, task.costs)]
        if facts.timed:
            timed = load_schedule(name, *sizes, times=task.workload.times)
            runs.insert(0, simulate(timed, task.costs))
        yield from [run for run in runs if task.fits(run)][:1]


def _solve_free(
    task: Task, named: list[Simulation], seconds: float, exact: bool, progress: Progress
) -> tuple[Table, float, bool]:
    """Return the best table, a makespan that none can beat, and `exact` of the solution."""
    begin = time.monotonic()
    until = begin + seconds * (HEURISTICS if exact else 1) if seconds else math.inf
    workload = task.workload
    bound = workload.lower_bound()
    starts = [workload.orders(stage_orders(run.table)) for run in named]
    starts = [orders for orders in starts if workload.fits(orders)]
    for policy in (*policies(workload, True), *policies(workload, False)):
        if not starts or time.monotonic() < until:
            starts.append(schedule_units(workload, policy))
    starts = sorted(set(starts), key=lambda orders: _makespan(workload, orders))[:STARTS]
    best = starts[0]
    progress(0, _makespan(workload, best), bound)
    for orders in starts:
        improved = improve(workload, orders, UNITS_TIMED // (3 * workload.num_pairs), until)
        best = min(best, improved, key=lambda orders: _makespan(workload, orders))
        progress(0, _makespan(workload, best), bound)
    if exact and _makespan(workload, best) > bound + 1e-9:
        from maxpipe.plan.cp_sat import solve_exactly  # an extra, slow to import

        def report(passed: float, makespan: float, proved: float) -> None:
            progress(passed, makespan, max(proved, least))

        left, least = seconds - (time.monotonic() - begin), bound
        exact = left > 0  # heuristics may take longer than their share
        if exact:
            best, bound = solve_exactly(workload, best, left, report)
    sizes = task.num_stages, task.num_microbatches, task.num_repeats
    return place(NAME, *sizes, workload.raw(best), task.placement), bound, exact


def _makespan(workload: Workload, orders: Orders) -> float:
    timing = workload.time(orders)
    assert timing is not None, "the orders contradict each other"
    return timing.makespan
