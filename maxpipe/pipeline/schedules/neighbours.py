"""Move a unit on the critical path to get orders that differ little from given ones.

A move brings a unit before or after its neighbours on the stage, or joins an I and its W into a B,
or splits a B.
"""

from collections.abc import Iterator

from maxpipe.pipeline.schedules.timed_orders import Orders, Workload

Move = tuple[int, int]  # the unit that moves, and the one whose place it takes


def neighbours(
    workload: Workload, orders: Orders, path: list[int]
) -> Iterator[tuple[Move, Orders]]:
    """Yield the moves of a critical path, and the orders that they give."""
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
    """Yield moves of the units from `first` to `last` of a stage's order."""
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
    """Yield orders with a backward of the path joined or split."""
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
