"""Reduce a schedule to a few numbers: idle slots, and what is in flight, for any M.

Tables grow with M, and what is read off them here grows linearly with it once the pipeline is full.
So two small tables give the numbers of every multiple of S.

Letters: S stages, V repeats, M microbatches.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import Table
from maxpipe.planning.simulate import Costs, simulate
from maxpipe.planning.stage_memory import units_in_flight


class Pattern(NamedTuple):
    """What a schedule costs besides its units.

    Attributes:
      idle_forward, idle_backward, idle_weight: slots that lockstep computes masked; a B counts as
        an I and a W.
      idle, idle_recomputed: time that a free-running schedule loses, in forwards of a chunk; the
        second where the backward recomputes the whole forward.
      transfers: ticks in which one transfer is not hidden by the other kind of unit.
      residuals, arrivals, stash: slots of a lockstep engine's stores; of a free-running schedule
        chunks in flight, waiting inputs, and chunks between I and W on the fullest stage.
    """

    idle_forward: float
    idle_backward: float
    idle_weight: float
    idle: float
    idle_recomputed: float
    transfers: float
    residuals: float
    arrivals: float
    stash: float


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
      schedule: of the catalogue.
      engine: that runs it.
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
        return Pattern(idle, idle, idle, 0.0, 0.0, waits, 0.0, 0.0, 0.0)
    if microbatches % period or microbatches <= 2 * period:
        return _of_table(schedule, engine, stages, microbatches, repeats, *options)
    if ENGINES[engine].lockstep:  # none of its numbers depends on how many periods there are
        return _of_table(schedule, engine, stages, 2 * period, repeats, *options)
    near = np.array(_of_table(schedule, engine, stages, 2 * period, repeats, *options))
    far = np.array(_of_table(schedule, engine, stages, 3 * period, repeats, *options))
    periods = microbatches / period
    return Pattern(*(near + (periods - 2) * (far - near)).tolist())


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
    if ENGINES[engine].lockstep:
        return _lockstep(table)
    return _free_running(table)


def _lockstep(table: Table) -> Pattern:
    units = table.num_microbatches * table.num_repeats
    spans = {kind: float(np.ptp(t[t >= 0])) + 1 - units for kind, t in table.ticks.items()}
    backward = spans.get("B", spans.get("I", 0.0))
    slots = activation_slots(table)
    return Pattern(
        spans["F"],
        backward,
        spans.get("W", backward),
        0.0,
        0.0,
        # In other ticks a transfer runs while units of the other kind compute.
        spans["F"] + backward if table.forwarding_delay == 1 else 0.0,
        slots.residuals.size,
        slots.activations.size + slots.gradients.size,
        slots.stash.size,
    )


def _free_running(table: Table) -> Pattern:
    plain = simulate(table)
    recomputed = simulate(table, Costs(backward=3.0, input_gradient=2.0))
    in_flight = units_in_flight(table)[0]
    most = in_flight[np.argmax(in_flight.sum(axis=1))]
    slots = activation_slots(table)
    hops = 2.0 * (table.num_stages - 1)
    return Pattern(
        0.0,
        0.0,
        0.0,
        float(plain.makespan - plain.work.max()),
        float(recomputed.makespan - recomputed.work.max()),
        hops,
        float(most[: table.num_repeats].sum()),
        float(slots.activations.peak[0] + slots.gradients.peak[0]),
        float(most[table.num_repeats :].sum()),
    )
