"""Find the schedule with the least makespan under a cap on activations in flight.

The search starts from every named schedule of these sizes that fits, and from list scheduling under
many policies; a tabu search improves the best of them, and CP-SAT proves a bound and improves them
further. So the result is never worse than a named schedule. Both forms of tables are searched where
either may be faster: lockstep ones spread the loss over the stages.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
FREE, LOCKSTEP = "free-running", "lockstep"
STARTS = 4  # orders that the tabu search improves
HEURISTICS = 1 / 3  # share of the time, at most, before CP-SAT
UNITS_TIMED = 600_000  # units that the tabu search times from each of these orders
Report = Callable[[float], None]  # called with the makespan of what was found


@dataclass(frozen=True)
class Task:
    """What to solve; the first four are as in `Table`."""

    num_stages: int
    num_microbatches: int
    num_repeats: int
    placement: str
    lockstep: bool | None  # whether the table is in lockstep; None for whichever is faster
    max_in_flight: int  # chunks that may be in flight on a stage, at least `num_repeats`
    costs: Costs  # times of units of one chunk

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.num_stages, self.num_microbatches, self.num_repeats

    @property
    def workload(self) -> Workload:
        times = self.costs.unit_times(self.num_stages, self.num_repeats, self.placement)
        return Workload(*self.sizes, self.placement, times, self.max_in_flight)

    @property
    def unit_of_time(self) -> float:
        longest = max(float(np.max(getattr(self.costs, name))) for name in _TIMES)
        return 10.0 ** math.floor(math.log10(longest)) if longest else 1.0

    def in_unit(self, unit: float) -> "Task":
        """Return the task with times in another unit; the search compares them up to rounding."""
        times = {name: (np.asarray(getattr(self.costs, name)) / unit).tolist() for name in _TIMES}
        return replace(self, costs=replace(self.costs, **times))

    def fits(self, run: Simulation) -> bool:
        return bool(run.peak_in_flight.max() <= self.max_in_flight)


@dataclass(frozen=True)
class Solution:
    run: Simulation  # the best schedule
    bound: float  # a makespan that no schedule of the searched forms can beat
    named: list[Simulation]  # the named schedules of these forms that fit, by makespan
    exact: bool  # whether CP-SAT searched wherever heuristics did not reach the bound
    forms: str  # of the tables that were searched, in words

    @property
    def is_optimal(self) -> bool:
        return self.run.makespan <= self.bound * (1 + 1e-6)


def solve(task: Task, seconds: float, report: Report) -> Solution:
    """Search until the time limit, or until the best schedule is proved optimal.

    Where the loss takes no time, ticks only delay units, and no engine runs them in V placement:
    then a task for whichever form is faster is one for a free-running table. With 0 seconds only
    the heuristics search, without a limit. `report` is called with makespans that were reached.
    """
    unit = task.unit_of_time
    scaled = task.in_unit(unit)
    # There are fewer lockstep tables, and most tasks are solved in a short time.
    forms = [True, False] if task.costs.head and task.placement == "loop" else [False]
    if task.lockstep is not None:
        forms = [task.lockstep]
    exact = seconds > 0 and is_installed("ortools")
    named, runs, bounds = [], [], []
    for form in forms:
        one = replace(scaled, lockstep=form)
        fitting = sorted(_named(one), key=lambda run: run.makespan)
        search = _solve_lockstep if form else _solve_free
        table, bound, exact = search(
            one, fitting, seconds / len(forms), exact, lambda makespan: report(makespan * unit)
        )
        validate(table)
        named += [simulate(run.table, task.costs) for run in fitting]
        runs.append(simulate(table, task.costs))
        bounds.append(bound * unit)
    best = min(runs, key=lambda run: run.makespan)
    assert task.fits(best)
    return Solution(
        best,
        min(*bounds, best.makespan),
        sorted(named, key=lambda run: run.makespan),
        exact,
        " or ".join(LOCKSTEP if form else FREE for form in sorted(forms)),
    )


def _named(task: Task) -> Iterator[Simulation]:
    """Yield the named schedules of a task's sizes, placement and form that fit its memory.

    Without a head the order of a lockstep table may also run freely, in no more time. With a head
    the lockstep table spreads it over the stages, which no free-running table does.
    """
    forms = (True,) if task.lockstep else (False,) if task.costs.head else (False, True)
    for name, facts in SCHEDULES.items():
        if facts.repeats_for(task.num_repeats) != task.num_repeats:
            continue
        table = load_schedule(name, *task.sizes)
        if table.placement != task.placement or table.lockstep not in forms:
            continue
        runs = [simulate(table, task.costs)]
        if facts.timed:
            timed = load_schedule(name, *task.sizes, times=task.workload.times)
            runs.insert(0, simulate(timed, task.costs))
        yield from [run for run in runs if task.fits(run)][:1]


def _solve_lockstep(
    task: Task, named: Sequence[Simulation], seconds: float, exact: bool, report: Report
) -> tuple[Table, float, bool]:
    """Return the best lockstep table, a makespan that none can beat, and `exact`.

    Tables with B and tables with I and W are searched one after the other.
    """
    least, ring = task.num_microbatches * task.num_repeats, task.num_stages - 1
    head = task.costs.head * task.num_microbatches / task.num_stages
    communication = task.costs.communication if ring else 0.0
    runs, bounds = [*named], []
    for kinds in ("FB", "FIW"):
        table = throttled(NAME, *task.sizes, task.placement, task.max_in_flight, kinds == "FIW")
        runs.append(simulate(table, task.costs))
        slots = {kind: float(task.costs.of(kind, task.num_stages).max()) for kind in kinds}
        # A stage has all its units of a kind in this span, and the last stage starts later.
        spans = {kind: least + (0 if kind == "W" else ring) for kind in kinds}
        bound = sum(slots[kind] * spans[kind] for kind in kinds) + head
        bound += communication * (least + ring - 1)
        seed = min((r for r in runs if {*kinds} == {*r.table.kinds}), key=lambda r: r.makespan)
        report(seed.makespan)
        if exact and seed.makespan > bound + 1e-9:
            from maxpipe.plan.cp_sat import solve_ticks  # an extra, slow to import

            limits = spans, task.max_in_flight, seconds / 2
            ticks, proved = solve_ticks(seed.table, slots, communication, *limits)
            bound = max(bound, proved + head)
            if ticks is not None:
                first = min(int(np.min(array)) for array in ticks.values())
                ticks = {kind: array - first for kind, array in ticks.items()}
                sizes = task.num_stages, task.num_repeats
                table = from_ticks(NAME, *sizes, ticks, placement=task.placement, lockstep=True)
                runs.append(simulate(table, task.costs))
        bounds.append(bound)
    best = min((run for run in runs if task.fits(run)), key=lambda run: run.makespan)
    return replace(best.table, name=NAME), min(bounds), exact


def _solve_free(
    task: Task, named: Sequence[Simulation], seconds: float, exact: bool, report: Report
) -> tuple[Table, float, bool]:
    begin = time.monotonic()
    until = begin + seconds * (HEURISTICS if exact else 1) if seconds else math.inf
    workload = task.workload
    bound = workload.lower_bound()

    def makespan(orders: Orders) -> float:
        timing = workload.time(orders)
        assert timing is not None, "the orders contradict each other"
        return timing.makespan

    starts = [workload.orders(stage_orders(run.table)) for run in named]
    starts = [orders for orders in starts if workload.fits(orders)]
    for policy in (*policies(workload, True), *policies(workload, False)):
        if not starts or time.monotonic() < until:
            starts.append(schedule_units(workload, policy))
    starts = sorted(set(starts), key=makespan)[:STARTS]
    best = starts[0]
    for orders in starts:
        report(makespan(best))
        improved = improve(workload, orders, UNITS_TIMED // (3 * workload.num_pairs), until)
        best = min(best, improved, key=makespan)
    if exact and makespan(best) > bound + 1e-9:
        from maxpipe.plan.cp_sat import solve_exactly  # an extra, slow to import

        left = seconds - (time.monotonic() - begin)
        exact = left > 0  # heuristics may take longer than their share
        if exact:
            best, bound = solve_exactly(workload, best, left)
    return place(NAME, *task.sizes, workload.raw(best), task.placement), bound, exact
