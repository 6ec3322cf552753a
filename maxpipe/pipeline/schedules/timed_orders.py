"""Time orders of units: when each runs, and what waits for what.

Letters: S stages, M microbatches, V repeats, G = V * S global chunks, N = M * G.

Units are numbers, so that an order is quickly timed: microbatch m and global chunk g give the pair
p = m * G + g; its F is p, its backward N + p, and its W 2N + p. A backward is an I with its own W,
or a B; pairs with a B are in `whole`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from maxpipe.pipeline.schedules.order import RawUnit
from maxpipe.pipeline.schedules.table import stages_of_chunks

TOLERANCE = 1e-9


class UnitTimes(NamedTuple):
    """Times of the units of each global chunk, [G] each, of transfers and of the head.

    Attributes:
      communication: time of one transfer between stages.
      head: time of loss and its gradient for one microbatch, after the last chunk's F.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    communication: float = 0.0
    head: float = 0.0


class Orders(NamedTuple):
    """The order of units on each stage, and the pairs whose backward is a B."""

    stages: tuple[tuple[int, ...], ...]
    whole: frozenset[int] = frozenset()


class Timing(NamedTuple):
    """When the units of some orders run.

    Attributes:
      span: longest time from a stage's first unit to its last.
      start, end: times of each unit, [3N]; the end of a unit that does not run is negative.
      last: the unit that ends last.
      last_of_span: the last unit of the stage with the longest span.
    """

    makespan: float
    span: float
    start: list[float]
    end: list[float]
    last: int
    last_of_span: int


@dataclass(frozen=True)
class Workload:
    """Units to order, with their times and the memory.

    Attributes:
      max_in_flight: chunks that may be in flight on a stage, at least V.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    placement: str
    times: UnitTimes
    max_in_flight: int

    @property
    def num_chunks(self) -> int:
        return self.num_stages * self.num_repeats

    @property
    def num_pairs(self) -> int:
        return self.num_microbatches * self.num_chunks

    @cached_property
    def stage_of(self) -> list[int]:
        return stages_of_chunks(self.num_stages, self.num_repeats, self.placement).tolist()

    @cached_property
    def durations(self) -> list[float]:
        """Return the time of each unit, [3N]; backwards as I."""
        times, last = self.times, self.num_chunks - 1
        rows = (times.forward, times.input_gradient, times.weight_gradient)
        durations = [time for row in rows for time in row * self.num_microbatches]
        for microbatch in range(self.num_microbatches):
            durations[microbatch * self.num_chunks + last] += times.head
        return durations

    @cached_property
    def whole_durations(self) -> list[float]:
        return list(self.times.backward * self.num_microbatches)

    @cached_property
    def work(self) -> list[float]:
        """Return the least time that each stage computes, [S]."""
        times, work = self.times, [0.0] * self.num_stages
        work[self.stage_of[-1]] += times.head
        for f, b, i, w, stage in zip(*times[:4], self.stage_of, strict=True):
            work[stage] += f + min(b, i + w)
        return [self.num_microbatches * time for time in work]

    @cached_property
    def needs(self) -> list[int]:
        """Return the unit whose result each unit waits for, [3N]; -1 for none."""
        pairs, chunks = self.num_pairs, self.num_chunks
        # An F waits for the previous chunk's F, a backward for the next chunk's backward, the last
        # chunk's backward for its own F, and a W for its I.
        forward = [p - 1 if p % chunks else -1 for p in range(pairs)]
        backward = [p if p % chunks == chunks - 1 else pairs + p + 1 for p in range(pairs)]
        return forward + backward + list(range(pairs, 2 * pairs))

    @cached_property
    def delays(self) -> list[float]:
        """Return the time from the end of a unit's input until the unit may start, [3N]."""
        return [
            self.times.communication
            if needed >= 0 and self.stage(needed) != self.stage(unit)
            else 0.0
            for unit, needed in enumerate(self.needs)
        ]

    def stage(self, unit: int) -> int:
        return self.stage_of[unit % self.num_chunks]

    def duration(self, unit: int, whole: frozenset[int]) -> float:
        pair = unit - self.num_pairs
        return self.whole_durations[pair] if pair in whole else self.durations[unit]

    def orders(self, raw: Iterable[Iterable[RawUnit]]) -> Orders:
        block = {"F": 0, "I": 1, "B": 1, "W": 2}
        whole, stages = set(), []
        for units in raw:
            row = []
            for kind, microbatch, chunk in units:
                pair = microbatch * self.num_chunks + chunk
                row.append(block[kind] * self.num_pairs + pair)
                if kind == "B":
                    whole.add(pair)
            stages.append(tuple(row))
        return Orders(tuple(stages), frozenset(whole))

    def raw(self, orders: Orders) -> list[list[RawUnit]]:
        return [[self._raw(unit, orders.whole) for unit in row] for row in orders.stages]

    def _raw(self, unit: int, whole: frozenset[int]) -> RawUnit:
        block, pair = divmod(unit, self.num_pairs)
        kind = "B" if block == 1 and pair in whole else "FIW"[block]
        return (kind, *divmod(pair, self.num_chunks))

    def peak(self, row: Sequence[int], whole: frozenset[int]) -> int:
        """Return the most chunks in flight on a stage with this order."""
        pairs = self.num_pairs
        in_flight = most = 0
        for unit in row:
            if unit < pairs:
                in_flight += 1
                most = max(most, in_flight)
            elif unit >= 2 * pairs or unit - pairs in whole:
                in_flight -= 1
        return most

    def fits(self, orders: Orders) -> bool:
        return all(self.peak(row, orders.whole) <= self.max_in_flight for row in orders.stages)

    def time(self, orders: Orders) -> Timing | None:
        """Run every unit as early as order and inputs allow; None if they contradict each other."""
        needs, delays, durations = self.needs, self.delays, self.durations
        pairs, whole, whole_durations = self.num_pairs, orders.whole, self.whole_durations
        start, end = [0.0] * (3 * pairs), [-1.0] * (3 * pairs)
        position, free = [0] * self.num_stages, [0.0] * self.num_stages
        waiting: dict[int, list[int]] = {}
        ready = list(range(self.num_stages))
        # A stage runs until a unit lacks its input; the unit that makes the input wakes it.
        while ready:
            stage = ready.pop()
            row, at, now = orders.stages[stage], position[stage], free[stage]
            while at < len(row):
                unit = row[at]
                needed = needs[unit]
                if needed >= 0:
                    if end[needed] < 0:
                        waiting.setdefault(needed, []).append(stage)
                        break
                    now = max(now, end[needed] + delays[unit])
                start[unit] = now
                pair = unit - pairs
                now += whole_durations[pair] if pair in whole else durations[unit]
                end[unit] = now
                at += 1
                if unit in waiting:
                    ready.extend(waiting.pop(unit))
            position[stage], free[stage] = at, now
        # No stage can go on but units are left: the orders wait for each other in a circle.
        if any(at < len(row) for at, row in zip(position, orders.stages, strict=True)):
            return None
        spans = [end[row[-1]] - start[row[0]] for row in orders.stages]
        makespan, span = max(free), max(spans)
        return Timing(
            makespan,
            span,
            start,
            end,
            orders.stages[free.index(makespan)][-1],
            orders.stages[spans.index(span)][-1],
        )

    def lower_bound(self) -> float:
        """Return a time that no order can beat: a stage's work after its first input arrives."""
        times, stage_of = self.times, self.stage_of
        arrival, bounds = 0.0, []
        # The first forward of a stage has passed all chunks before it; all its work comes after.
        for chunk, stage in enumerate(stage_of):
            if stage not in stage_of[:chunk]:
                bounds.append(arrival + self.work[stage])
            arrival += times.forward[chunk]
            if chunk + 1 < len(stage_of) and stage_of[chunk + 1] != stage:
                arrival += times.communication
        return max(bounds)
