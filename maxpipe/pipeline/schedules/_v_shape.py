"""Schedules of two chunks per stage in V placement: stage s holds chunks s and 2S - 1 - s.

Some of them follow from a building block that is repeated for every microbatch. The building block (Qi et al.,
arXiv:2405.15362) says when one microbatch passes a stage: F down through the first chunks, F back through the second
ones, I down again, and I back. Blocks follow each other every six units of time, in which a stage does two F, two I
and two W; so the time from a chunk's F to the end of its backward, divided by six, is the number of microbatches in
flight there.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from maxpipe.pipeline.schedules._order import RawUnit, dependency, place
from maxpipe.pipeline.schedules._schedule import Schedule
from maxpipe.pipeline.schedules._table import Table

PERIOD = 6
PASSES = (("F", 0), ("F", 1), ("I", 0), ("I", 1))  # kind, and whether it runs back through the stages


class VSchedule(Schedule):
    """Base class; subclasses say the table."""

    engines = ("mpmd",)
    fixed_repeats = 2

    @classmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        return cls._table(num_stages, num_microbatches)

    @classmethod
    @abstractmethod
    def _table(cls, num_stages: int, num_microbatches: int) -> Table:
        """The table for sizes that were checked."""


def without_missing(
    name: str, order: Callable[[int, int, int], Iterable[RawUnit]], num_stages: int, num_microbatches: int, least: int
) -> Table:
    """The table of an order that is known for `least` microbatches and more.

    Args:
      order: (stage, number of stages, number of microbatches) -> the stage's units. With fewer than `least`
        microbatches the order is that of `least`, without the ones that are missing.
    """
    orders = [order(s, num_stages, max(num_microbatches, least)) for s in range(num_stages)]
    kept = [[unit for unit in stage if unit[1] < num_microbatches] for stage in orders]
    return place(name, num_stages, num_microbatches, 2, kept, placement="v")


def repeated_block(
    name: str, num_stages: int, num_microbatches: int, hops: Sequence[int], max_in_flight: int
) -> Table:
    """The table of a building block.

    The block gives each stage the order of its F and I. A W runs when its stage would be idle, or has
    `max_in_flight` chunks in flight; at the start and the end of a step, where the block leaves stages idle, that
    closes what gaps it can.

    Args:
      hops: units of time from a stage to the next, in each of `PASSES`.
      max_in_flight: chunks in flight on a stage, at least what the block needs.
    """
    starts = _block(num_stages, hops)
    queues = []
    for stage in range(num_stages):
        chunks = stage, 2 * num_stages - 1 - stage
        timed = []
        for start, (kind, back) in zip(starts, PASSES, strict=True):
            # I passes the second chunks first.
            chunk = chunks[back if kind == "F" else 1 - back]
            timed += [(start[stage] + PERIOD * m, (kind, m, chunk)) for m in range(num_microbatches)]
        queues.append([unit for _, unit in sorted(timed)])
    orders = _fill_with_w(queues, max_in_flight)
    return place(name, num_stages, num_microbatches, 2, orders, placement="v")


def _block(num_stages: int, hops: Sequence[int]) -> list[list[int]]:
    """When the first microbatch's passes start on each stage.

    Between passes a microbatch waits as long as it takes for the four of a stage to fall on different times modulo
    the period, in all stages.
    """
    down = range(num_stages)
    for waits in sorted(product(range(PERIOD), repeat=3), key=sum):
        starts: list[list[int]] = []
        begin = 0
        for hop, (_, back), wait in zip(hops, PASSES, (*waits, 0), strict=True):
            starts.append([begin + hop * (num_stages - 1 - s if back else s) for s in down])
            begin = max(starts[-1]) + 1 + wait
        if all(len({start[s] % PERIOD for start in starts}) == len(PASSES) for s in down):
            return starts
    raise AssertionError(f"no building block with hops {hops} for {num_stages} stages")


def _fill_with_w(queues: Sequence[Sequence[RawUnit]], max_in_flight: int) -> list[list[RawUnit]]:
    """Orders of F, I and W from orders of F and I, by running them with units of equal length."""
    last = 2 * len(queues) - 1
    units = {unit for queue in queues for unit in queue}
    orders: list[list[RawUnit]] = [[] for _ in queues]
    position, in_flight = [0] * len(queues), [0] * len(queues)
    due: list[list[RawUnit]] = [[] for _ in queues]
    done: set[RawUnit] = set()
    while any(due) or any(p < len(queue) for p, queue in zip(position, queues, strict=True)):
        finished = []
        for stage, queue in enumerate(queues):
            unit = queue[position[stage]] if position[stage] < len(queue) else None
            needs = unit and dependency(unit, last, units)
            is_ready = unit is not None and (needs is None or needs in done)
            if unit and is_ready and not (unit[0] == "F" and in_flight[stage] == max_in_flight):
                position[stage] += 1
                in_flight[stage] += unit[0] == "F"
                finished.append(unit)
                if unit[0] == "I":
                    due[stage].append(("W", *unit[1:]))
            elif due[stage]:
                unit = due[stage].pop(0)
                in_flight[stage] -= 1
            else:
                continue
            orders[stage].append(unit)
        done.update(finished)
    return orders
