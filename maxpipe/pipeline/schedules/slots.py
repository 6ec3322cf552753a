"""Where a table keeps what is in flight: interval colouring of four stores.

A store is a number of equal slots on every stage. A value's lifetime is the inclusive range of
ticks [first, last]; two values may share a slot if their lifetimes do not meet.

    activations  written when the transfer lands, at the end of tick first - 1; read by the F at tick last
    gradients    the same for the B (or I) that reads it; those of the loss are written by the head, see below
    residuals    written by the F at tick first; read for the last time by the B (or W) at tick last
    stash        what an I hands to its W, by ticks of the two

So an activation that lands at the end of tick t may take the slot that the F of tick t has just
read, while the F of tick t must not write its residuals where the B of tick t, later in the tick,
still reads. A transfer sent at tick t lands at the end of tick t + forwarding_delay - 1. The
gradient of the loss needs a slot only if the B of the last chunk runs in a later tick than its F:
it is written at the end of the F's tick.
"""

from dataclasses import dataclass

import numpy as np

from maxpipe.pipeline.schedules.table import Table


@dataclass(frozen=True, eq=False)
class Store:
    """One of the four stores; lifetimes are sorted by stage, then first tick.

    Attributes:
      size: slots per stage that the table needs: its true peak over all stages.
      peak: int [S], the same for each stage.
      stage, microbatch, global_chunk: int, of the unit that reads the value, one entry per value.
      first, last: int, its lifetime in ticks, inclusive.
      slot: int, where it lives.
    """

    size: int
    peak: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    global_chunk: np.ndarray
    first: np.ndarray
    last: np.ndarray
    slot: np.ndarray


@dataclass(frozen=True)
class ActivationSlots:
    """The four stores of a table."""

    activations: Store
    gradients: Store
    residuals: Store
    stash: Store


def activation_slots(table: Table) -> ActivationSlots:
    """Colours the lifetimes of everything in flight.

    Args:
      table: a valid table; one with F units only has an activation store only, the others are
        empty.
    """
    delay = table.forwarding_delay
    forward = table.ticks["F"]
    arrived = _colour(table, forward[:, :-1] + delay, forward[:, 1:], 1)
    nothing = _colour(table, forward[:, :0], forward[:, :0], 0)
    if table.kinds == ("F",):
        return ActivationSlots(arrived, nothing, nothing, nothing)
    backward = table.merged_ticks("BI")
    # The head's gradient is a value of the last chunk; a same-tick one has first > last and is left
    # out.
    landed = np.concatenate([backward[:, 1:] + delay, forward[:, -1:] + 1], axis=1)
    weights = table.merged_ticks("BW")
    stashed = np.where(table.merged_ticks("W") >= 0, table.merged_ticks("I"), weights + 1)
    return ActivationSlots(
        arrived,
        _colour(table, landed, backward, 0),
        _colour(table, forward, weights, 0),
        _colour(table, stashed, weights, 0),
    )


def _colour(table: Table, first: np.ndarray, last: np.ndarray, chunk_offset: int) -> Store:
    """Assigns slots to the lifetimes [M, chunks]; column i belongs to global chunk i + chunk_offset."""
    microbatch, column = np.nonzero(first <= last)
    first, last = first[microbatch, column], last[microbatch, column]
    chunk = column + chunk_offset
    stage = table.stage_of_chunk[chunk]
    order = np.lexsort((last, first, stage))
    stage, microbatch, chunk, first, last = (
        a[order] for a in (stage, microbatch, chunk, first, last)
    )
    slot = np.zeros(len(first), int)
    peak = np.zeros(table.num_stages, int)
    for s in range(table.num_stages):
        mine = slice(*np.searchsorted(stage, (s, s + 1)))
        slot[mine], peak[s] = _colour_stage(first[mine], last[mine])
    return Store(int(peak.max()), peak, stage, microbatch, chunk, first, last, slot)


def _colour_stage(first: np.ndarray, last: np.ndarray) -> tuple[list[int], int]:
    """Greedy colouring of lifetimes sorted by their first tick, which is optimal for intervals."""
    by_last = np.argsort(last, kind="stable").tolist()
    ends = last.tolist()
    slots: list[int] = []
    free: list[int] = []
    ended = size = 0
    for tick in first.tolist():
        while ended < len(slots) and ends[by_last[ended]] < tick:
            free.append(slots[by_last[ended]])
            ended += 1
        if not free:
            free.append(size)
            size += 1
        slots.append(free.pop())
    return slots, size
