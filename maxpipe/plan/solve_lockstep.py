"""Find the lockstep table with the least makespan under a cap on activations in flight."""

from dataclasses import replace

import numpy as np

from maxpipe.pipeline.schedules.table import Table, from_ticks
from maxpipe.pipeline.schedules.throttled import throttled
from maxpipe.plan.simulate import Simulation, simulate
from maxpipe.plan.solver_task import NAME, Progress, Task


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
    from maxpipe.plan.cp_sat import scale_of  # an extra, slow to import
    from maxpipe.plan.cp_sat_lockstep import SlotTimes, solve_ticks

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
