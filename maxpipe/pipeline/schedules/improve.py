"""Improve orders of units by tabu search over the critical path.

The critical path leads from the unit that ends last back to time 0: each unit on it starts when the
one before it on its stage ends, or when its input arrives. Only a change of order on that path can
shorten a step; and only one on the path to the end of the longest span can shorten that span, since
a stage starts as early as it can.
"""

import math
import time
from collections.abc import Iterator

from maxpipe.pipeline.schedules.timed_orders import TOLERANCE, Orders, Timing, Workload

Move = tuple[int, int]  # the unit that moves, and the one whose place it takes


def neighbours(
    workload: Workload, orders: Orders, path: list[int]
) -> Iterator[tuple[Move, Orders]]:
    """Yield the moves of a critical path, and the orders that they give.

    A move brings a unit before or after its neighbours on the stage, or joins an I and its W into a
    B, or splits a B.
    """
    index = {unit: (s, i) for s, row in enumerate(orders.stages) for i, unit in enumerate(row)}
    block = [path[-1]]
    for unit in [*path[-2::-1], -1]:
        stage, position = index[block[-1]]
        if unit >= 0 and index[unit] == (stage, position + 1):
            block.append(unit)
            continue
        yield from _moves_of_block(workload, orders, stage, index[block[0]][1], position)
        block = [unit]
    _, backward, gradient, weight, *_ = workload.times
    if any(b < i + w for b, i, w in zip(backward, gradient, weight, strict=True)):
        yield from _joins(workload, orders, path, index)


def _moves_of_block(
    workload: Workload, orders: Orders, stage: int, first: int, last: int
) -> Iterator[tuple[Move, Orders]]:
    row = orders.stages[stage]
    shifts = [(i + 1, i) for i in range(first, last)]
    shifts += [(i, first) for i in range(first + 2, min(last + 1, first + 5))]
    shifts += [(last, i) for i in range(max(last - 4, first + 1), last - 1)]
    # The first one may also go to the end.
    shifts += [(first, last)] if last - first > 1 else []
    for source, target in shifts:
        moved = list(row)
        unit = moved.pop(source)
        moved.insert(target, unit)
        low, high = min(source, target), max(source, target)
        passed = row[low:high] if target < source else row[low + 1 : high + 1]
        own = unit % workload.num_pairs
        if any(other % workload.num_pairs == own for other in passed):
            continue  # F, I and W of a pair keep their order
        if workload.peak(moved, orders.whole) > workload.max_in_flight:
            continue
        stages = (*orders.stages[:stage], tuple(moved), *orders.stages[stage + 1 :])
        yield (unit, row[target]), Orders(stages, orders.whole)


def _joins(
    workload: Workload, orders: Orders, path: list[int], index: dict[int, tuple[int, int]]
) -> Iterator[tuple[Move, Orders]]:
    pairs = workload.num_pairs
    for unit in path:
        if not pairs <= unit < 2 * pairs:
            continue
        pair, (stage, position) = unit - pairs, index[unit]
        row = list(orders.stages[stage])
        if pair in orders.whole:
            row.insert(position + 1, 2 * pairs + pair)
            whole = orders.whole - {pair}
        else:
            row.remove(2 * pairs + pair)
            whole = orders.whole | {pair}
        stages = (*orders.stages[:stage], tuple(row), *orders.stages[stage + 1 :])
        if workload.peak(row, whole) <= workload.max_in_flight:
            yield (unit, unit), Orders(stages, whole)


Cost = tuple[float, float]
TENURE = 12  # moves during which a pair of swapped units is not swapped back
CANDIDATES = 40  # moves that are tried from one set of orders


def improve(
    workload: Workload,
    orders: Orders,
    max_trials: int,
    until: float = math.inf,
    *,
    by_span: bool = False,
) -> Orders:
    """Return orders that take no more time: the best of a search that starts from the given ones.

    Args:
      max_trials: number of orders to time; the search is deterministic if it gets this far.
      until: time of `time.monotonic` at which the search stops.
      by_span: whether to minimise the longest span instead of the makespan.
    """

    def cost(timing: Timing) -> Cost:
        costs = timing.makespan, timing.span
        return costs[::-1] if by_span else costs

    timing = workload.time(orders)
    assert timing is not None
    best, best_cost, current = orders, cost(timing), orders
    bound = max(workload.work) if by_span else workload.lower_bound()
    tabu: dict[Move, int] = {}
    trials = step = 0
    while trials < max_trials and best_cost[0] > bound + TOLERANCE and time.monotonic() < until:
        step += 1
        last = timing.last_of_span if by_span else timing.last
        path = _critical_path(workload, current, timing, last)
        options: list[tuple[Cost, Move, Orders, Timing]] = []
        # 1. Time the orders that one move makes, except those that contradict the inputs.
        for move, neighbour in neighbours(workload, current, path):
            if len(options) == CANDIDATES:
                break
            trials += 1
            tried = workload.time(neighbour)
            if tried is None:
                continue
            value = cost(tried)
            # A recent swap is not undone, unless that gives the best order so far.
            if tabu.get(move, 0) < step or value < best_cost:
                options.append((value, move, neighbour, tried))
        if not options:
            break
        # 2. Take the best of them even if it is worse than the current one, to leave local minima.
        value, move, current, timing = min(options, key=lambda option: option[:2])
        # The length varies with the step, so that the search does not run in a circle.
        tabu[move[::-1]] = step + TENURE + step % 7
        # 3. Of orders with equal makespan the one with the shorter span is better, or the reverse.
        if value[0] < best_cost[0] - TOLERANCE or (
            value[0] < best_cost[0] + TOLERANCE and value[1] < best_cost[1] - TOLERANCE
        ):
            best, best_cost = current, value
    return best


def _critical_path(workload: Workload, orders: Orders, timing: Timing, last: int) -> list[int]:
    """Return the units of the critical path that leads to `last`, the last unit first."""
    before = {
        unit: row[index - 1] if index else -1
        for row in orders.stages
        for index, unit in enumerate(row)
    }
    unit = last
    path = [unit]
    while True:
        previous, needed = before[unit], workload.needs[unit]
        begin = timing.start[unit]
        if previous >= 0 and timing.end[previous] >= begin - TOLERANCE:
            unit = previous
        elif needed >= 0 and timing.end[needed] + workload.delays[unit] >= begin - TOLERANCE:
            unit = needed
        else:
            return path
        path.append(unit)
