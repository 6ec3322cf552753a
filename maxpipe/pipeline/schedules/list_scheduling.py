"""Build orders of units by list scheduling: whatever is ready first runs first, within the memory.

A stage that is free takes a ready unit by the preferences of a `Policy`, and a W when it has
nothing else to do or its memory is full. An F starts only if afterwards there is still room for the
other forwards of the oldest microbatch that has any left on this stage, so that it can pass all
chunks and come back: the memory never stays full forever.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from maxpipe.pipeline.schedules.timed_orders import TOLERANCE, Orders, Workload


class Policy(NamedTuple):
    """Preferences of a stage.

    Attributes:
      deep: whether later chunks run first.
      alternate: whether F and backwards take turns; otherwise a backward that is ready runs first.
      patience: share of a W's time by which the W may hold up a unit that arrives meanwhile.
      max_due: number of due W from which on one runs before any other unit.
      whole: whether backwards are B; otherwise I and W.
    """

    deep: bool
    alternate: bool
    patience: float
    max_due: int
    whole: bool


def policies(workload: Workload, whole: bool) -> Iterator[Policy]:
    if whole:
        yield from (
            Policy(deep, turns, 0, 1, True) for deep, turns in product((True, False), (True, False))
        )
        return
    due = sorted({1, 2, workload.num_stages, 10**9})
    for deep, turns, patience, max_due in product((True, False), (True, False), (0, 0.5, 1), due):
        yield Policy(deep, turns, patience, max_due, False)


class Choice(NamedTuple):
    start: float
    stage: int
    unit: int


def schedule_units(workload: Workload, policy: Policy) -> Orders:
    """Return the orders that a policy gives; they fit the memory."""
    state = _State(workload, policy)
    # The earliest start over all stages is final: nothing that runs later can bring it forward.
    while choices := [choice for s in range(workload.num_stages) if (choice := state.next(s))]:
        state.run(min(choices))
    whole = frozenset(range(workload.num_pairs)) if policy.whole else frozenset()
    return Orders(tuple(map(tuple, state.rows)), whole)


@dataclass
class _State:
    workload: Workload
    policy: Policy

    def __post_init__(self) -> None:
        stages, chunks = self.workload.num_stages, self.workload.num_chunks
        self.rows: list[list[int]] = [[] for _ in range(stages)]  # the orders so far
        self.free = [0.0] * stages  # time from which each stage is free
        self.in_flight = [0] * stages  # chunks on each stage
        self.due: list[list[int]] = [[] for _ in range(stages)]  # W of each stage
        self.forwards = [0] * chunks  # how many of each chunk have run
        self.backwards = [0] * chunks
        self.end: dict[int, float] = {}  # of each unit that has run
        self.whole = frozenset(range(self.workload.num_pairs)) if self.policy.whole else frozenset()
        self.chunks = [
            [chunk for chunk, at in enumerate(self.workload.stage_of) if at == stage]
            for stage in range(stages)
        ]

    def next(self, stage: int) -> Choice | None:
        """Return what a stage would run next, or None if it has to wait for another stage."""
        now, due, policy = self.free[stage], self.due[stage], self.policy
        # 1. Too many W are due: one runs now, which also frees memory.
        if len(due) >= policy.max_due:
            return Choice(now, stage, due[0])
        forwards, backwards = self._forwards(stage), self._backwards(stage)
        # 2. A unit with its input runs at once: a backward, unless it is a forward's turn.
        ready = [
            [unit for start, unit in units if start <= now + TOLERANCE]
            for units in (forwards, backwards)
        ]
        pairs, row = self.workload.num_pairs, self.rows[stage]
        last = next((unit for unit in reversed(row) if unit < 2 * pairs), 0)
        if ready[1] and not (policy.alternate and ready[0] and last >= pairs):
            return Choice(now, stage, self._prefer(ready[1]))
        if ready[0]:
            return Choice(now, stage, self._prefer(ready[0]))
        # 3. Otherwise a W fills the time until the next input, if it hardly delays that unit.
        coming = min(forwards + backwards, default=None)
        if due:
            enough = self.workload.durations[due[0]] * (1 - policy.patience)
            if coming is None or now + enough <= coming[0] + TOLERANCE:
                return Choice(now, stage, due[0])
        # 4. Otherwise the stage waits for that input; if none is coming, for other stages.
        return Choice(coming[0], stage, coming[1]) if coming else None

    def run(self, choice: Choice) -> None:
        pairs, chunks = self.workload.num_pairs, self.workload.num_chunks
        start, stage, unit = choice
        self.end[unit] = self.free[stage] = start + self.workload.duration(unit, self.whole)
        self.rows[stage].append(unit)
        if unit < pairs:
            self.forwards[unit % chunks] += 1
            self.in_flight[stage] += 1
        elif unit < 2 * pairs and not self.policy.whole:
            self.backwards[unit % chunks] += 1
            self.due[stage].append(unit + pairs)
        elif unit < 2 * pairs:
            self.backwards[unit % chunks] += 1
            self.in_flight[stage] -= 1
        else:
            self.due[stage].pop(0)
            self.in_flight[stage] -= 1

    def _forwards(self, stage: int) -> list[tuple[float, int]]:
        workload, chunks = self.workload, self.chunks[stage]
        # A microbatch that has begun must be able to finish: keep room for its other chunks here.
        oldest = min(self.forwards[chunk] for chunk in chunks)
        rest = sum(self.forwards[chunk] <= oldest for chunk in chunks)
        options = []
        for chunk in chunks:
            microbatch = self.forwards[chunk]
            reserve = rest if microbatch == oldest else rest + 1
            room = workload.max_in_flight - self.in_flight[stage]
            if microbatch < workload.num_microbatches and reserve <= room:
                options += self._arrival(microbatch * workload.num_chunks + chunk)
        return options

    def _backwards(self, stage: int) -> list[tuple[float, int]]:
        options = []
        for chunk in self.chunks[stage]:
            if self.backwards[chunk] < self.forwards[chunk]:
                pair = self.backwards[chunk] * self.workload.num_chunks + chunk
                options += self._arrival(self.workload.num_pairs + pair)
        return options

    def _arrival(self, unit: int) -> list[tuple[float, int]]:
        needed = self.workload.needs[unit]
        if needed < 0:
            return [(0.0, unit)]
        if needed not in self.end:
            return []
        return [(self.end[needed] + self.workload.delays[unit], unit)]

    def _prefer(self, units: list[int]) -> int:
        chunks = self.workload.num_chunks
        return max(units, key=lambda u: (u % chunks) if self.policy.deep else -(u % chunks))
