"""Reduce a schedule to a few numbers: idle slots, and what is in flight, for any M.

Tables grow with M, and what is read off them here grows linearly with it once the pipeline is full.
So two small tables give the numbers for every M that leaves the same remainder, divided by S.

Letters: S stages, V repeats, M microbatches.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import KINDS, Table
from maxpipe.plan.number import Number
from maxpipe.plan.simulate import Costs, simulate

# The stage of the first chunk, the stage of the last chunk, and all others.
FIRST_STAGE, LAST_STAGE, OTHER_STAGES = range(3)
# What is counted at the fullest moments of a stage: chunks between F and the end of B or I, and
# between I and W, and the stage's first chunk among these and among those. A column makes a moment
# the fullest: by either, by both, and the same for the first chunk alone.
_FULLEST = np.array(
    [[1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1]]
)
_MANY = 1e6  # more than there are chunks, so that a count divided by it only breaks ties


class Pattern(NamedTuple):
    """What a schedule costs besides its units; a B counts as an I and a W.

    `in_flight` is of a free-running schedule, float [5, 3, 6]: the four counts of `_FULLEST`, and
    inputs and gradients that may wait; by stage (see above), at its fullest moments.
    """

    idle_forward: Number = 0.0  # slots that lockstep computes masked
    idle_backward: Number = 0.0
    idle_weight: Number = 0.0
    idle: Number = 0.0  # time that a free-running schedule loses, in forwards of a chunk
    idle_recomputed: Number = 0.0  # the same where the backward recomputes the whole forward
    transfers: Number = 0.0  # ticks in which one transfer is not hidden by the other kind of unit
    residuals: Number = 0.0  # slots of a lockstep engine's stores
    arrivals: Number = 0.0
    stash: Number = 0.0
    turns_back: Number = 0.0  # 1 if free-running, with the first and the last chunk on one stage
    in_flight: Number = 0.0


def pattern(
    schedule: str,
    engine: str,
    stages: int,
    microbatches: int,
    repeats: int,
    *,
    delay: int = 1,
    slack: int = 0,
) -> Pattern:
    """Return the pattern of a schedule on an engine; `delay` and `slack` as in `load_schedule`.

    Raises:
      ScheduleError: the schedule does not have these sizes.
    """
    period = delay * stages
    options = (delay, slack)
    if not ENGINES[engine].lockstep and not ENGINES[engine].one_program:
        options = (1, 0)
    elif not ENGINES[engine].lockstep:
        idle = float(delay * (stages - 1))
        # Every iteration waits for its transfer, unless that is delayed.
        waits = 2.0 * (microbatches * repeats + idle) if delay == 1 else 0.0
        return Pattern(idle_forward=idle, idle_backward=idle, idle_weight=idle, transfers=waits)
    remainder = microbatches % period
    # Schedules of several chunks spread the remainder over the periods, one microbatch each.
    periods = 2 + (remainder if repeats > 1 else 0)
    more = microbatches // period - periods
    if more <= 0:
        return _of_table(schedule, engine, stages, microbatches, repeats, *options)
    full = periods * period + remainder
    near = _of_table(schedule, engine, stages, full, repeats, *options)
    if ENGINES[engine].lockstep:  # none of its numbers depends on how many periods there are
        return near
    far = _of_table(schedule, engine, stages, full + period, repeats, *options)
    return Pattern(*(n + more * (f - n) for n, f in zip(near, far, strict=True)))


@cache
def _of_table(
    schedule: str, engine: str, stages: int, microbatches: int, repeats: int, delay: int, slack: int
) -> Pattern:
    facts = SCHEDULES[schedule]
    table = load_schedule(
        schedule,
        stages,
        microbatches,
        repeats,
        forwarding_delay=delay if facts.delays else 1,
        slack=slack if facts.overlaps else 0,
    )
    return pattern_of_table(table, engine)


def pattern_of_table(table: Table, engine: str) -> Pattern:
    return _lockstep(table) if ENGINES[engine].lockstep else _free_running(table)


def _lockstep(table: Table) -> Pattern:
    units = table.num_microbatches * table.num_repeats
    spans = {kind: float(np.ptp(t[t >= 0])) + 1 - units for kind, t in table.ticks.items()}
    backward = spans.get("B", spans.get("I", 0.0))
    slots = activation_slots(table)
    return Pattern(
        idle_forward=spans["F"],
        idle_backward=backward,
        idle_weight=spans.get("W", backward),
        # In other ticks a transfer runs while units of the other kind compute, see `timing`.
        transfers=spans["F"] + backward if table.forwarding_delay == 1 else 0.0,
        residuals=slots.residuals.size,
        arrivals=slots.activations.size + slots.gradients.size,
        stash=slots.stash.size,
    )


def _free_running(table: Table) -> Pattern:
    plain = simulate(table)
    recomputed = simulate(table, Costs(backward=3.0, input_gradient=2.0))
    hops = 2.0 * (table.num_stages - 1)
    return Pattern(
        idle=float(plain.makespan - plain.work.max()),
        idle_recomputed=float(recomputed.makespan - recomputed.work.max()),
        transfers=hops,
        turns_back=float(table.stage_of_chunk[0] == table.stage_of_chunk[-1]),
        in_flight=_in_flight(table),
    )


def _in_flight(table: Table) -> np.ndarray:
    repeats, slots = table.num_repeats, activation_slots(table)
    arrivals = np.asarray(slots.activations.peak) + np.asarray(slots.gradients.peak)
    combinations = units_in_flight(table)
    first, last = int(table.stage_of_chunk[0]), int(table.stage_of_chunk[-1])
    others = [stage for stage in range(table.num_stages) if stage not in (first, last)]
    found = np.zeros((5, 3, _FULLEST.shape[1]))
    for place, stages in ((FIRST_STAGE, [first]), (LAST_STAGE, [last]), (OTHER_STAGES, others)):
        if stages:
            units = np.concatenate([combinations[stage] for stage in stages])
            totals = units[:, :repeats].sum(1), units[:, repeats:].sum(1)
            counts = np.stack([*totals, units[:, 0], units[:, repeats]], axis=1)
            ranks = counts @ _FULLEST + sum(totals)[:, None] / _MANY
            found[:4, place] = counts[ranks.argmax(axis=0)].T
            found[4, place] = max(arrivals[stage] for stage in stages)
    return found


def units_in_flight(table: Table) -> list[np.ndarray]:
    """Count, for each stage, how many units of each of its V chunks are in flight at once.

    Returns:
      For each stage int [combinations, 2 V]. The first V columns count units between F and the end
      of B or I, the others those between I and the end of W. Each combination that occurs is listed
      once.
    """
    repeats = table.num_repeats
    events: list[list[tuple[int, int, str, int]]] = [[] for _ in range(table.num_stages)]
    for kind in table.kinds:
        for tick, stage, _, chunk in zip(*(a.tolist() for a in table.units(kind)), strict=True):
            events[stage].append((tick, KINDS.index(kind), kind, chunk))
    changes = {"F": ((0, 1),), "B": ((0, -1),), "I": ((0, -1), (repeats, 1)), "W": ((repeats, -1),)}
    combinations = []
    for events_of_stage in events:
        count, seen = [0] * (2 * repeats), set()
        for _, _, kind, chunk in sorted(events_of_stage):
            for first_column, change in changes[kind]:
                count[first_column + chunk] += change
            seen.add(tuple(count))
        combinations.append(np.array(sorted(seen)))
    return combinations
