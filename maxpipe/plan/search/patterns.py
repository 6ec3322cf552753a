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
from maxpipe.plan.simulate import Costs, simulate

# The stage of the first chunk, the stage of the last chunk, and all others.
FIRST_STAGE, LAST_STAGE, OTHER_STAGES = range(3)
_MOMENTS = 6
_MANY = 1e6  # more than there are chunks, so that a count divided by it only breaks ties


class InFlight(NamedTuple):
    """Chunks in flight of a free-running schedule, float [3, 6]: by stage, at its fullest moments.

    The stages are `FIRST_STAGE`, `LAST_STAGE` and `OTHER_STAGES`. The moments are those with the
    most chunks between F and the end of B or I, with the most between I and W, with the most of
    both, and the same three counted for the stage's first chunk alone.

    Attributes:
      saved: chunks between F and the end of B or I.
      handed_over: chunks between I and W.
      saved_first, handed_over_first: the part of these that is the stage's first chunk.
      arrived: inputs and gradients that may wait.
    """

    saved: np.ndarray
    handed_over: np.ndarray
    saved_first: np.ndarray
    handed_over_first: np.ndarray
    arrived: np.ndarray

    def extrapolated(self, far: "InFlight", times: float) -> "InFlight":
        """Return what is in flight at `times` the distance from here to `far`."""
        pairs = zip(self, far, strict=True)
        return InFlight(*(near + times * (there - near) for near, there in pairs))


_NOTHING = InFlight(*np.zeros((len(InFlight._fields), 3, _MOMENTS)))


class Pattern(NamedTuple):
    """What a schedule costs besides its units.

    Attributes:
      idle_forward, idle_backward, idle_weight: slots that lockstep computes masked; a B counts as
        an I and a W.
      idle, idle_recomputed: time that a free-running schedule loses, in forwards of a chunk; the
        second where the backward recomputes the whole forward.
      transfers: ticks in which one transfer is not hidden by the other kind of unit.
      residuals, arrivals, stash: slots of a lockstep engine's stores.
      turns_back: 1 if a free-running schedule has the first and the last chunk on one stage.
      in_flight: chunks in flight of a free-running schedule.
    """

    idle_forward: float = 0.0
    idle_backward: float = 0.0
    idle_weight: float = 0.0
    idle: float = 0.0
    idle_recomputed: float = 0.0
    transfers: float = 0.0
    residuals: float = 0.0
    arrivals: float = 0.0
    stash: float = 0.0
    turns_back: float = 0.0
    in_flight: InFlight = _NOTHING


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
    """Return the pattern of a schedule on an engine.

    Args:
      schedule: name of a schedule in the catalogue.
      engine: name of the engine that runs it.
      stages, microbatches, repeats: S, M, V.
      delay, slack: see `load_schedule`.

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
    numbers = np.array(near[:-1]) + more * (np.array(far[:-1]) - np.array(near[:-1]))
    in_flight = near.in_flight.extrapolated(far.in_flight, more)
    return Pattern._make([*numbers.tolist(), in_flight])


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


def _in_flight(table: Table) -> InFlight:
    repeats, slots = table.num_repeats, activation_slots(table)
    arrivals = np.asarray(slots.activations.peak) + np.asarray(slots.gradients.peak)
    combinations = units_in_flight(table)
    first, last = int(table.stage_of_chunk[0]), int(table.stage_of_chunk[-1])
    others = [stage for stage in range(table.num_stages) if stage not in (first, last)]
    result = InFlight(*np.zeros_like(_NOTHING))
    for place, stages in ((FIRST_STAGE, [first]), (LAST_STAGE, [last]), (OTHER_STAGES, others)):
        if not stages:
            continue
        counts = np.concatenate([combinations[stage] for stage in stages])
        saved, handed_over = counts[:, :repeats].sum(1), counts[:, repeats:].sum(1)
        saved_first, handed_over_first = counts[:, 0], counts[:, repeats]
        both, of_first = saved + handed_over, saved_first + handed_over_first
        ranks = (saved, handed_over, both, saved_first, handed_over_first, of_first)
        fullest = [int(np.argmax(rank + both / _MANY)) for rank in ranks]
        result.saved[place] = saved[fullest]
        result.handed_over[place] = handed_over[fullest]
        result.saved_first[place] = saved_first[fullest]
        result.handed_over_first[place] = handed_over_first[fullest]
        result.arrived[place] = max(arrivals[stage] for stage in stages)
    return result


def units_in_flight(table: Table) -> list[np.ndarray]:
    """Count, for each stage, how many units of each of its chunks are in flight at once.

    Returns:
      For each stage int [combinations, 2 V], V chunks of a stage. The first V columns count units
      between F and the end of B or I, the others those between I and the end of W. Each combination
      that occurs is listed once.
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
