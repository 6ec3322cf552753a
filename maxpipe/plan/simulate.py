"""Simulate a schedule: time, idle time, memory and traffic, from its table and units' costs.

Lockstep tables run as one SPMD program does. From the first unit of a kind to the last, every tick
computes that slot on every stage, masked where it is idle, and takes as long as the slowest stage.
A tick ends with its transfers, unless the forwarding delay lets them run during the next tick.
Free-running tables keep only the order of units on each stage: a unit starts when its stage is free
and its input has arrived, and transfers delay the receiver only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from maxpipe.pipeline.schedules.table import IDLE, Table, stages_of_chunks
from maxpipe.pipeline.schedules.timed_orders import UnitTimes

PerStage = float | Sequence[float]

# Times that differ by less than this part of the makespan differ by rounding alone.
ROUNDING = 1e-9

# The field of `Costs` that has the time of each kind of unit.
COST_FIELDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


@dataclass(frozen=True)
class Costs:
    """The times that a simulation uses, all in the same unit of time.

    The time of an F, B, I or W is one number, or one for each stage, or one for each global chunk.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    communication: float = 0.0  # of one transfer between neighbouring stages
    # Time of loss and its gradient for one microbatch on one stage. Lockstep spreads it over all
    # stages, inside the tick; free-running runs it on the last stage, after the last chunk's F.
    head: float = 0.0
    # Fraction of the time of F and B (or I) that is collectives within a stage. With `slack`, one
    # slot's collectives run during the other's computation.
    collectives: float = 0.0
    activation_bytes: float = 1.0  # of one transfer

    def of(self, kind: str, num_stages: int) -> np.ndarray:
        """Return the time of a unit of a kind on each stage, float [S]."""
        return np.broadcast_to(np.asarray(getattr(self, COST_FIELDS[kind]), float), num_stages)

    def of_chunks(self, kind: str, table: Table) -> np.ndarray:
        """Return the time of a unit of a kind of each global chunk, float [G]."""
        if np.shape(getattr(self, COST_FIELDS[kind])) == (table.num_chunks,):
            return self.of(kind, table.num_chunks)
        return self.of(kind, table.num_stages)[table.stage_of_chunk]

    def unit_times(self, num_stages: int, num_repeats: int, placement: str) -> UnitTimes:
        """Return the times of units in the form that orders take, without `collectives`."""
        stage_of = stages_of_chunks(num_stages, num_repeats, placement)
        forward, backward, input_gradient, weight_gradient = (
            tuple(self.of(kind, num_stages)[stage_of].tolist()) for kind in "FBIW"
        )
        return UnitTimes(
            forward, backward, input_gradient, weight_gradient, self.communication, self.head
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step; S stages, M microbatches, G global chunks."""

    table: Table
    start: Mapping[str, np.ndarray]  # for each kind, float [M, G]; NaN where there is no unit
    end: Mapping[str, np.ndarray]
    head_start: np.ndarray  # float [M], when the loss of each microbatch is computed
    head_end: np.ndarray
    makespan: float  # time from the first unit to the end of the last
    work: np.ndarray  # float [S], time that each stage computes, its part of the head included
    last_end: np.ndarray  # float [S], when each stage's last unit ends
    span: np.ndarray  # float [S], from a stage's first unit to its last; lockstep: the makespan
    peak_in_flight: np.ndarray = field(init=False)  # int [S], most chunks between F and B (or W)
    peak_stash: np.ndarray = field(init=False)  # int [S], most chunks between I and W
    bytes_sent: np.ndarray  # float [S], activations and gradients sent to other stages

    def __post_init__(self) -> None:
        stages = range(self.table.num_stages)
        for name, curve in (("peak_in_flight", self.in_flight), ("peak_stash", self.stash)):
            object.__setattr__(
                self, name, np.array([int(curve(s)[1].max(initial=0)) for s in stages])
            )

    @property
    def bubble(self) -> float:
        """Return how long a stage is idle on average, from the step's first unit to its last."""
        return self._lost(self.makespan - self.work.mean())

    @property
    def bubble_fraction(self) -> float:
        return self.bubble / self.makespan if self.makespan > 0 else 0.0

    @property
    def idle_in_span(self) -> float:
        """Return the longest time from a stage's first unit to its last, minus the most work.

        Zero-bubble schedules bring this to 0: without a barrier, such as an optimizer that waits
        for all gradients, steps would overlap where stages start and end at different times.
        """
        return self._lost(self.span.max() - self.work.max())

    def _lost(self, time: float) -> float:
        return float(time) if time > ROUNDING * self.makespan else 0.0

    @property
    def slowest(self) -> tuple[int, float]:
        """Return the stage that works longest, and by what part longer than the mean of all."""
        stage, mean = int(self.work.argmax()), self.work.mean()
        return stage, float(self.work[stage] / mean - 1) if mean > 0 else 0.0

    def in_flight(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return when the number of chunks in flight on a stage changes, and its new value."""
        ends = [self.end[kind] for kind in "BW" if kind in self.end]
        return self._alive(stage, self.start["F"], np.fmax.reduce(ends) if ends else None)

    def stash(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the same for the chunks that are between their I and their W."""
        return self._alive(stage, self.start.get("I"), self.end.get("W"))

    def _alive(
        self, stage: int, start: np.ndarray | None, end: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        on_stage = self.table.stage_of_chunk == stage
        begin, finish = (np.empty(0) if t is None else t[:, on_stage].ravel() for t in (start, end))
        begin, finish = (t[~np.isnan(t)] for t in (begin, finish))
        times = np.concatenate([finish, begin])
        change = np.concatenate([np.full(len(finish), -1), np.ones(len(begin), int)])
        # What ends when another begins is not in flight with it; rounding must not reorder the two.
        by_time = np.argsort(times)
        moment = np.empty(len(times), int)
        moment[by_time] = np.cumsum(np.diff(times[by_time], prepend=0.0) > ROUNDING * self.makespan)
        order = np.lexsort((change, moment))
        return times[order], np.cumsum(change[order])


def simulate(table: Table, costs: Costs | None = None) -> Simulation:
    """Run a valid table against costs; by default F = 1, B = 2, I = W = 1 and all else is free."""
    costs = costs or Costs()
    duration = {kind: costs.of_chunks(kind, table) for kind in table.kinds}
    run = _run_lockstep if table.lockstep else _run_free
    start, end, head_start, head_end, makespan = run(table, duration, costs)
    work = np.zeros(table.num_stages)
    for kind in table.kinds:
        spent = duration[kind] * (table.ticks[kind] >= 0).sum(axis=0)
        work += np.bincount(table.stage_of_chunk, spent, table.num_stages)
    if table.lockstep:
        work += costs.head * table.num_microbatches / table.num_stages
    else:
        work[table.stage_of_chunk[-1]] += costs.head * table.num_microbatches
    stages = [table.stage_of_chunk == s for s in range(table.num_stages)]
    # A stage may have no units of some kind.
    first = np.array([np.nanmin([t[:, chunks] for t in start.values()]) for chunks in stages])
    last = np.array([np.nanmax([t[:, chunks] for t in end.values()]) for chunks in stages])
    last[table.stage_of_chunk[-1]] = max(last[table.stage_of_chunk[-1]], head_end.max())
    span = np.full(table.num_stages, makespan) if table.lockstep else last - first
    bytes_sent = _transfers(table) * costs.activation_bytes
    return Simulation(
        table, start, end, head_start, head_end, makespan, work, last, span, bytes_sent
    )


def _transfers(table: Table) -> np.ndarray:
    stage = table.stage_of_chunk
    moves = stage[1:] != stage[:-1]
    count = np.bincount(stage[:-1][moves], minlength=table.num_stages)
    if table.kinds != ("F",):
        count = count + np.bincount(stage[1:][moves], minlength=table.num_stages)
    return count * table.num_microbatches


# Start and end of the units, start and end of the head, makespan: fields of `Simulation`.
Times = tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray, np.ndarray, float]


def _run_lockstep(table: Table, duration: Mapping[str, np.ndarray], costs: Costs) -> Times:
    """Run the slots of a tick one after the other, every stage waiting for the slowest."""
    slot = {kind: np.zeros(table.num_ticks) for kind in table.kinds}
    sends = np.zeros(table.num_ticks, bool)
    for kind in table.kinds:
        ticks = np.flatnonzero((table.microbatch[kind] != IDLE).any(axis=1))
        slot[kind][ticks[0] : ticks[-1] + 1] = duration[kind].max()
        sends[ticks[0] : ticks[-1] + 1] |= kind != "W" and table.num_stages > 1
    head_tick = table.ticks["F"][:, -1]
    head = np.bincount(head_tick, minlength=table.num_ticks) * costs.head / table.num_stages
    total = sum(slot.values(), head)
    backward = "I" if "I" in table.kinds else "B"
    after = slot.get("W", 0.0)
    if table.slack and backward in table.kinds:
        pair = slot["F"] + slot[backward]
        shared = np.maximum(costs.collectives * pair, (1 - costs.collectives) * pair)
        total -= pair - np.maximum.reduce([shared, slot["F"], slot[backward]])
    transfer = np.where(sends, costs.communication, 0.0)
    length = np.maximum(total, transfer) if table.forwarding_delay > 1 else total + transfer
    begin = np.cumsum(length) - length
    start, end = {}, {}
    offset = begin.copy()
    for kind in table.kinds:
        if kind == backward:
            # Where slots overlap, only W comes after B in a tick, and B starts before F has ended.
            offset = np.minimum(offset, begin + total - after - slot[kind])
        start[kind] = _at(table.ticks[kind], offset)
        end[kind] = start[kind] + duration[kind]
        offset = offset + slot[kind]
        if kind == "F":
            head_start = offset[head_tick]
            offset = offset + head
    # Idle slots are computed too; the transfer of the last tick delays no unit.
    makespan = float(begin[-1] + total[-1])
    return start, end, head_start, head_start + costs.head / table.num_stages, makespan


def _at(ticks: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(ticks >= 0, values[ticks], np.nan)


def _run_free(table: Table, duration: Mapping[str, np.ndarray], costs: Costs) -> Times:
    """Run the units in each stage's order, as early as stage and input allow.

    Ticks order the units so that whatever one depends on was timed before it.
    """
    num_units = table.num_microbatches * table.num_chunks
    offset = {kind: index * num_units for index, kind in enumerate("FBIW")}
    shape = (table.num_ticks, table.num_stages)
    unit, needs = np.full(shape, -1), np.full(shape, -1)
    length, delay = np.zeros(shape), np.zeros(shape)
    stage_of, last = table.stage_of_chunk, table.num_chunks - 1
    for kind in table.kinds:
        tick, stage, microbatch, chunk = table.units(kind)
        chunk = table.global_chunk(chunk, stage)
        at = microbatch * table.num_chunks + chunk
        unit[tick, stage] = offset[kind] + at
        length[tick, stage] = duration[kind][chunk]
        if kind == "F":
            length[tick, stage] += np.where(chunk == last, costs.head, 0.0)
            needs[tick, stage] = np.where(chunk > 0, at - 1, -1)
            source = np.maximum(chunk - 1, 0)
        elif kind == "W":
            needs[tick, stage] = offset["I"] + at
            source = chunk
        else:
            source = np.minimum(chunk + 1, last)
            is_unsplit = table.merged_ticks("B")[microbatch, source] >= 0
            gradient = np.where(is_unsplit, offset["B"], offset["I"]) + at + 1
            needs[tick, stage] = np.where(chunk < last, gradient, at)
        delay[tick, stage] = np.where(stage_of[source] != stage, costs.communication, 0.0)
    # The entry past the end is an input that is always available.
    end = np.full(4 * num_units + 1, np.nan)
    end[-1] = 0.0
    free = np.zeros(table.num_stages)
    for row in range(table.num_ticks):
        active = np.flatnonzero(unit[row] >= 0)
        ready = end[needs[row, active]] + delay[row, active]
        free[active] = np.maximum(free[active], ready) + length[row, active]
        end[unit[row, active]] = free[active]
    took = np.full(4 * num_units, np.nan)
    took[unit[unit >= 0]] = length[unit >= 0]
    grid = (table.num_microbatches, table.num_chunks)
    ends = {
        kind: end[offset[kind] : offset[kind] + num_units].reshape(grid) for kind in table.kinds
    }
    starts = {
        k: ends[k] - took[offset[k] : offset[k] + num_units].reshape(grid) for k in table.kinds
    }
    head_end = ends["F"][:, -1].copy()
    ends["F"][:, -1] -= costs.head
    return starts, ends, head_end - costs.head, head_end, float(free.max())
