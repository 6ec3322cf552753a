"""Adapt an order of F, I and W to the times that units take, within its memory.

After the heuristic of "Zero Bubble Pipeline Parallelism" (Qi et al., arXiv:2401.10241, whose B is
our I): each stage keeps an order of F and I; a W fills the time for which its stage would wait, and
runs at once when the memory is full. Orders in which a W may hold up the next unit are tried as
well. A tabu search improves the best orders that this gives.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

from maxpipe.pipeline.schedules.improve import improve
from maxpipe.pipeline.schedules.order import RawUnit, place, stage_orders
from maxpipe.pipeline.schedules.table import Table
from maxpipe.pipeline.schedules.timed_orders import TOLERANCE, Orders, UnitTimes, Workload

STARTS = 3  # orders that the tabu search improves, for the makespan and for the spans
UNITS_TIMED = 100_000  # units that the tabu search times, from each of them

Rank = tuple[float, float, float]


def adapt(
    table: Table,
    times: UnitTimes,
    max_in_flight: int,
    others: Iterable[Sequence[Iterable[RawUnit]]] = (),
) -> Table:
    """Return a table for these times: neither its makespan nor its longest span is worse.

    The result depends on the arguments alone, whatever the machine. No backward becomes a B.

    Args:
      table: a free-running table with I and W.
      max_in_flight: chunks that may be in flight on a stage, at least as many as the table has.
      others: further orders of F and I on each stage to try.
    """
    sizes = table.num_stages, table.num_microbatches, table.num_repeats
    split = tuple(i + w for i, w in zip(times.input_gradient, times.weight_gradient, strict=True))
    workload = Workload(*sizes, table.placement, times._replace(backward=split), max_in_flight)
    published = workload.orders(stage_orders(table))
    first_w = 2 * workload.num_pairs
    without_w = tuple(tuple(unit for unit in row if unit < first_w) for row in published.stages)
    queues = [Orders(without_w), *(workload.orders(rows) for rows in others)]
    best = _best(workload, published, tuple(dict.fromkeys(queues)))
    if best == published:
        return table
    return place(table.name, *sizes, workload.raw(best), table.placement)


@lru_cache(maxsize=64)
def _best(workload: Workload, published: Orders, queues: tuple[Orders, ...]) -> Orders:
    # Cached, since a run needs the same orders several times.
    limit = workload.time(published)
    assert limit is not None

    def rank(orders: Orders) -> Rank:
        timing = workload.time(orders)
        assert timing is not None, "the orders contradict each other"
        makespan, span = round(timing.makespan, 9), round(timing.span, 9)
        worse = max(makespan - limit.makespan, 0.0) + max(span - limit.span, 0.0)
        return (worse if worse > TOLERANCE else 0.0), makespan, span

    ranks = {published: rank(published)}

    def add(orders: Orders) -> None:
        if orders not in ranks:
            ranks[orders] = rank(orders)

    for queue, patience, level in product(queues, (0.0, 0.5, 1.0), (False, True)):
        add(fill(workload, queue, patience, level))
    for by_span in (False, True):
        # Ties keep the order in which orders were found, the published one first.
        for orders in sorted(ranks, key=ranks.__getitem__)[:STARTS]:
            trials = UNITS_TIMED // (3 * workload.num_pairs)
            add(improve(workload, orders, trials, by_span=by_span))
    return min(ranks, key=ranks.__getitem__)


def fill(workload: Workload, queues: Orders, patience: float, level: bool) -> Orders:
    """Return orders with a W for each I, where their stages would wait or their memory is full.

    Args:
      queues: order of F and I on each stage.
      patience: share of a W's time by which the W may hold up the next unit.
      level: whether a W also runs if its stage would otherwise have waited longer than any other
        has so far.
    """
    pairs, stages = workload.num_pairs, range(workload.num_stages)
    rows: list[list[int]] = [[] for _ in stages]
    due: list[list[int]] = [[] for _ in stages]
    free, waited = [0.0] * len(stages), [0.0] * len(stages)
    position, in_flight = [0] * len(stages), [0] * len(stages)
    end: dict[int, float] = {}

    def choose(stage: int) -> tuple[float, int, int] | None:
        """Return (start, stage, unit) of the next unit of a stage; None if it waits for another."""
        now, queue, weights = free[stage], queues.stages[stage], due[stage]
        weight = (now, stage, weights[0]) if weights else None
        if position[stage] == len(queue):
            return weight
        unit = queue[position[stage]]
        if unit < pairs and in_flight[stage] == workload.max_in_flight:
            return weight
        needed = workload.needs[unit]
        if needed >= 0 and needed not in end:
            return weight
        start = max(now, end[needed] + workload.delays[unit] if needed >= 0 else 0.0)
        if weight is None or start <= now + TOLERANCE:
            return start, stage, unit
        fits = now + workload.durations[weight[2]] * (1 - patience) <= start + TOLERANCE
        is_latest = level and waited[stage] + start - now > max(waited) + TOLERANCE
        return weight if fits or is_latest else (start, stage, unit)

    # The earliest start over all stages is final: nothing that runs later can bring it forward.
    while choices := [choice for stage in stages if (choice := choose(stage))]:
        start, stage, unit = min(choices)
        if rows[stage]:
            waited[stage] += start - free[stage]
        free[stage] = end[unit] = start + workload.durations[unit]
        rows[stage].append(unit)
        if unit >= 2 * pairs:
            due[stage].remove(unit)
            in_flight[stage] -= 1
            continue
        position[stage] += 1
        if unit < pairs:
            in_flight[stage] += 1
        else:
            due[stage].append(unit + pairs)
    assert all(at == len(queue) for at, queue in zip(position, queues.stages, strict=True))
    return Orders(tuple(map(tuple, rows)))
