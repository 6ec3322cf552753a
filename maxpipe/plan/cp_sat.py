"""Find the schedule with the least makespan, and a bound on it, with OR-Tools' CP-SAT.

Microbatches are alike, so some best order has, on every stage, the units of each kind and chunk in
the order of microbatches: whatever their order, the k-th input to arrive can be labelled microbatch
k. The models impose this order, which makes the search much smaller.

Of orders of units times are whole numbers in the model. They are rounded down, so that its bound
holds for the given times; the order that it finds is timed with the given ones. Lockstep tables
compute, from a kind's first unit to its last, the slot of that kind on all stages in every tick. So
their makespan is the sum over kinds of this span, in ticks, times the slot's time.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from maxpipe.pipeline.schedules.table import Table
from maxpipe.pipeline.schedules.timed_orders import TOLERANCE, Orders, Workload

MAX_SCALE = 10_000
Ticks = dict[str, np.ndarray]


class _Model(cp_model.CpModel):
    def __init__(self, horizon: int) -> None:
        super().__init__()
        self._horizon = horizon

    def time(self) -> cp_model.IntVar:
        return self.new_int_var(0, self._horizon, "")

    def cap(self, lives: Sequence[tuple[cp_model.IntVar, cp_model.LinearExprT]], most: int) -> None:
        """Let at most so many of these (start, end) overlap."""
        if most < len(lives):
            intervals = [self.new_interval_var(s, self.time(), end, "") for s, end in lives]
            self.add_cumulative(intervals, [1] * len(intervals), most)

    def solve(self, seconds: float) -> tuple[cp_model.CpSolver | None, float]:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        status = solver.solve(self)
        is_solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return (solver if is_solved else None), solver.best_objective_bound


class _Backward(NamedTuple):
    """The backward of a pair in the model: an I with a W, or a B."""

    start: cp_model.IntVar  # of the I or B
    end: cp_model.LinearExprT
    weight: cp_model.IntVar  # start of the W, or of the B if there is no W
    release: cp_model.LinearExprT  # time from which the pair is no longer in flight
    is_whole: cp_model.IntVar | None  # true if it is a B; None if it can never be one


class OrderModel:
    """A CP-SAT model of a workload, some order of which is known to reach the horizon."""

    def __init__(self, workload: Workload, horizon: float) -> None:
        self.workload = workload
        times = [*workload.durations, *workload.whole_durations, *workload.delays]
        self.scale = scale_of(times)
        self.model = _Model(int(horizon * self.scale + 1))
        pairs = range(workload.num_pairs)
        units = np.reshape([self.length(time) for time in workload.durations], (3, -1)).T.tolist()
        # The lengths of each pair's F, I, W and B.
        self.lengths = [
            (*unit, self.length(b)) for unit, b in zip(units, workload.whole_durations, strict=True)
        ]
        self.forward = [self.model.time() for _ in pairs]
        self.backward = [self._backward(pair) for pair in pairs]
        makespan = self.model.time()
        for pair in pairs:
            self.model.add(makespan >= self.backward[pair].release)
            self._order(pair)
        for stage in range(workload.num_stages):
            self._fill_stage([pair for pair in pairs if workload.stage(pair) == stage])
        self.model.add(makespan >= self.length(workload.lower_bound()))
        self.model.minimize(makespan)

    def length(self, time: float) -> int:
        """Return a time in the model's units, rounded down."""
        return int(time * self.scale + TOLERANCE * self.scale)

    def _backward(self, pair: int) -> _Backward:
        model = self.model
        _, i, w, b = self.lengths[pair]
        start, weight = model.time(), model.time()
        if b >= i + w:  # an I and then its W take no longer, and the gradient is ready earlier
            model.add(weight >= start + i)
            return _Backward(start, start + i, weight, weight + w, None)
        is_whole, end, release = model.new_bool_var(""), model.time(), model.time()
        model.add(end == start + i + (b - i) * is_whole)
        model.add(weight >= end).only_enforce_if(~is_whole)
        model.add(weight == start).only_enforce_if(is_whole)
        model.add(release == weight + w).only_enforce_if(~is_whole)
        model.add(release == end).only_enforce_if(is_whole)
        return _Backward(start, end, weight, release, is_whole)

    def _order(self, pair: int) -> None:
        """Let a pair follow the microbatch before it, and the chunk before it."""
        workload, chunks, add = self.workload, self.workload.num_chunks, self.model.add
        f, backward = self.forward[pair], self.backward[pair]
        if pair >= chunks:
            before = self.backward[pair - chunks]
            add(f >= self.forward[pair - chunks] + self.lengths[pair - chunks][0])
            add(backward.start >= before.end)
            splits = [~x.is_whole for x in (before, backward) if x.is_whole is not None]
            order = add(backward.weight >= before.weight + self.lengths[pair - chunks][2])
            if splits:
                order.only_enforce_if(*splits)
        if pair % chunks:
            is_far = workload.stage(pair) != workload.stage(pair - 1)
            delay = self.length(workload.times.communication) * is_far
            add(f >= self.forward[pair - 1] + self.lengths[pair - 1][0] + delay)
            add(self.backward[pair - 1].start >= backward.end + delay)
        if pair % chunks == chunks - 1:
            add(backward.start >= f + self.lengths[pair][0])

    def _fill_stage(self, pairs: Sequence[int]) -> None:
        """Let a stage run one unit at a time, with no more in flight than allowed."""
        model, most = self.model, self.workload.max_in_flight
        units = []
        for pair in pairs:
            f, i, w, b = self.lengths[pair]
            start, _, weight, _, is_whole = self.backward[pair]
            units.append(model.new_fixed_size_interval_var(self.forward[pair], f, ""))
            for begin, length, when_whole in ((start, i, 0), (weight, w, 0), (start, b, 1)):
                if is_whole is not None:
                    present = is_whole if when_whole else ~is_whole
                    units.append(
                        model.new_optional_fixed_size_interval_var(begin, length, present, "")
                    )
                elif not when_whole:
                    units.append(model.new_fixed_size_interval_var(begin, length, ""))
        model.add_no_overlap(units)
        lives = [(self.forward[pair], self.backward[pair].release) for pair in pairs]
        if self.workload.num_repeats == 1 and all(self.backward[p].is_whole is None for p in pairs):
            for (_, release), (start, _) in zip(lives, lives[most:], strict=False):
                model.add(start >= release)
        else:
            model.cap(lives, most)

    def hint(self, orders: Orders, start: Sequence[float]) -> None:
        pairs = self.workload.num_pairs
        for pair, backward in enumerate(self.backward):
            is_whole = pair in orders.whole
            units = pair, pairs + pair, pair + pairs * (1 if is_whole else 2)
            variables = self.forward[pair], backward.start, backward.weight
            for variable, unit in zip(variables, units, strict=True):
                self.model.add_hint(variable, self.length(start[unit]))
            if backward.is_whole is not None:
                self.model.add_hint(backward.is_whole, is_whole)

    def orders(self, value: Callable[[cp_model.LinearExprT], int]) -> Orders:
        workload, pairs = self.workload, self.workload.num_pairs
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(workload.num_stages)]
        whole = set()
        for pair, backward in enumerate(self.backward):
            row = rows[workload.stage(pair)]
            row.append((value(self.forward[pair]), 0, pair))
            row.append((value(backward.start), 1, pairs + pair))
            if backward.is_whole is not None and value(backward.is_whole):
                whole.add(pair)
            else:
                row.append((value(backward.weight), 2, 2 * pairs + pair))
        return Orders(tuple(tuple(u for *_, u in sorted(r)) for r in rows), frozenset(whole))


def solve_exactly(workload: Workload, orders: Orders, seconds: float) -> tuple[Orders, float]:
    """Return the best orders found within a time limit, and a bound that no order can beat."""
    timing = workload.time(orders)
    assert timing is not None
    model = OrderModel(workload, timing.makespan)
    model.hint(orders, timing.start)
    solver, bound = model.model.solve(seconds)
    makespan = timing.makespan
    if solver is not None:
        solved = model.orders(solver.value)
        timing = workload.time(solved)
        if timing and workload.fits(solved) and timing.makespan < makespan:
            orders, makespan = solved, timing.makespan
    return orders, min(max(workload.lower_bound(), bound / model.scale), makespan)


def scale_of(times: Sequence[float]) -> int:
    """Return the model's units per unit of time: few that make all times whole, else many."""
    for scale in (step * 10**power for power in range(6) for step in (1, 2, 5)):
        if all(abs(time * scale - round(time * scale)) < 1e-7 for time in times):
            return scale
    return MAX_SCALE


def solve_ticks(
    seed: Table,
    slots: Mapping[str, float],
    communication: float,
    least: Mapping[str, int],
    max_in_flight: int,
    seconds: float,
) -> tuple[Ticks | None, float]:
    """Return the ticks of the best lockstep table found, and a bound that no table can beat.

    Args:
      seed: a table that fits the memory, with the kinds of units of `slots`.
      slots: time of each kind of unit in a tick; the loss is not counted.
      communication: time of the transfers of a tick.
      least: ticks from the first unit of each kind to its last, at least.
    """
    model, last = _Model(seed.num_ticks), seed.num_chunks - 1
    kinds, add = (*slots,), model.add
    back, end = kinds[1], kinds[-1]  # the units that send gradients, and that end a microbatch
    units = [*product(range(seed.num_microbatches), range(seed.num_chunks))]
    ticks = {kind: {unit: model.time() for unit in units} for kind in kinds}
    for kind, unit in product(kinds, units):
        model.add_hint(ticks[kind][unit], int(seed.ticks[kind][unit]))
        if unit[0]:
            add(ticks[kind][unit] >= ticks[kind][unit[0] - 1, unit[1]] + 1)
    for m, chunk in units:
        if chunk < last:
            add(ticks["F"][m, chunk + 1] >= ticks["F"][m, chunk] + 1)
            add(ticks[back][m, chunk] >= ticks[back][m, chunk + 1] + 1)
        for before, after in pairwise(kinds) if chunk == last else pairwise(kinds[1:]):
            add(ticks[after][m, chunk] >= ticks[before][m, chunk])
    for stage in range(seed.num_stages):
        of_stage = [unit for unit in units if seed.stage_of_chunk[unit[1]] == stage]
        for kind in kinds:
            model.add_all_different([ticks[kind][unit] for unit in of_stage])
        model.cap([(ticks["F"][u], ticks[end][u] + 1) for u in of_stage], max_in_flight)
    scale = scale_of([*slots.values(), communication])
    terms: list[cp_model.LinearExprT] = []
    stops = {}
    for kind in kinds:
        start, stops[kind] = model.time(), model.time()
        model.add_min_equality(start, ticks[kind].values())
        model.add_max_equality(stops[kind], ticks[kind].values())
        span = stops[kind] - start + 1
        add(span >= least[kind])
        terms.append(int(slots[kind] * scale + 1e-6) * span)
    # Every tick up to the last I or B ends with transfers; those of the last one delay nothing.
    trailing = model.new_bool_var("")
    if end != back:
        add(stops[end] <= stops[back]).only_enforce_if(~trailing)
    terms.append(int(communication * scale + 1e-6) * (stops[back] + trailing))
    model.minimize(cp_model.LinearExpr.sum(terms))
    solver, bound = model.solve(seconds)
    if solver is None:
        return None, bound / scale
    shape = seed.num_microbatches, seed.num_chunks
    found = {
        kind: np.reshape([solver.value(of[unit]) for unit in units], shape)
        for kind, of in ticks.items()
    }
    return found, bound / scale
