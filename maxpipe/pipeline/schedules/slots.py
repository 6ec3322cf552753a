"""Assign slots to what a table has in flight: interval colouring of four stores.

A store is a number of equal slots on every stage. A value's lifetime is the inclusive range of
ticks [first, last]; two values may share a slot if their lifetimes do not overlap.

    activations  written when the transfer lands, in tick first - 1; read by the F at tick last
    gradients    the same for the B (or I) that reads it; the head writes those of the loss
    residuals    written by the F at tick first; read for the last time by the B (or W) at tick last
    stash        written by an I at tick first; read by its W at tick last

So an activation that lands at the end of tick t may take the slot that the F of tick t has just
read, while the F of tick t must not write its residuals where the B of tick t, later in the tick,
still reads. A transfer sent at tick t lands at the end of tick t + forwarding_delay - 1. The
gradient of the loss needs a slot only if the B of the last chunk runs in a later tick than its F:
it is written at the end of the F's tick.

An example, lockstep 1F1B with S=2, M=3, V=1:

    tick    0  1     2     3     4
    stage 0 F0 F1    F2+B0 B1    B2
    stage 1    F0+B0 F1+B1 F2+B2

On stage 0 the residuals of microbatches 0, 1 and 2 live in ticks [0, 2], [1, 3] and [2, 4]; all
three overlap in tick 2, so the store has three slots. Their gradients arrive one tick before they
are read and live in [2, 2], [3, 3] and [4, 4]: one slot.
"""

from dataclasses import dataclass

import numpy as np

from maxpipe.pipeline.schedules.table import Table


@dataclass(frozen=True, eq=False)
class Store:
    """One of the four stores; values are sorted by stage, then first tick.

    Attributes:
      size: slots per stage that the table needs: its peak over all stages.
      peak: int [S], slots that each stage needs.
      stage, microbatch, global_chunk: int [values], the unit that reads each value.
      first, last: int [values], lifetime in ticks, inclusive.
      slot: int [values], the slot of each.
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
    activations: Store
    gradients: Store
    residuals: Store
    stash: Store


def activation_slots(table: Table) -> ActivationSlots:
    """Assign slots to everything in flight; of F units only, all stores but one are empty."""
    delay = table.forwarding_delay
    forward = table.ticks["F"]
    # Chunk i + 1 reads what chunk i has sent.
    activations = _colour(table, forward[:, :-1] + delay, forward[:, 1:], chunk_offset=1)
    if table.kinds == ("F",):
        empty = _colour(table, forward[:, :0], forward[:, :0], chunk_offset=0)
        return ActivationSlots(activations, gradients=empty, residuals=empty, stash=empty)
    input_gradient = table.merged_ticks("BI")
    weight_gradient = table.merged_ticks("BW")
    # Chunk i reads what chunk i + 1 has sent, and the last chunk the head's gradient. A value
    # that is read in the same tick has first > last, so it gets no slot; nor has a B a stash.
    arrival = np.concatenate([input_gradient[:, 1:] + delay, forward[:, -1:] + 1], axis=1)
    is_split = table.merged_ticks("W") >= 0
    stashed = np.where(is_split, input_gradient, weight_gradient + 1)
    return ActivationSlots(
        activations,
        gradients=_colour(table, arrival, input_gradient, chunk_offset=0),
        residuals=_colour(table, forward, weight_gradient, chunk_offset=0),
        stash=_colour(table, stashed, weight_gradient, chunk_offset=0),
    )


def _colour(table: Table, first: np.ndarray, last: np.ndarray, chunk_offset: int) -> Store:
    """Assign slots to lifetimes [M, chunks]; column i belongs to global chunk i + chunk_offset."""
    microbatch, column = np.nonzero(first <= last)
    first, last = first[microbatch, column], last[microbatch, column]
    chunk = column + chunk_offset
    stage = table.stage_of_chunk[chunk]
    order = np.lexsort((last, first, stage))
    units = (stage, microbatch, chunk, first, last)
    stage, microbatch, chunk, first, last = (of_units[order] for of_units in units)
    slot = np.zeros(len(first), int)
    peak = np.zeros(table.num_stages, int)
    for s in range(table.num_stages):
        on_stage = slice(*np.searchsorted(stage, (s, s + 1)))
        slot[on_stage], peak[s] = _colour_stage(first[on_stage], last[on_stage])
    return Store(
        size=int(peak.max()),
        peak=peak,
        stage=stage,
        microbatch=microbatch,
        global_chunk=chunk,
        first=first,
        last=last,
        slot=slot,
    )


def _colour_stage(first: np.ndarray, last: np.ndarray) -> tuple[list[int], int]:
    """Return (slot of each value, number of slots) for lifetimes sorted by their first tick.

    Greedy: a value takes any slot that is free, which needs the fewest slots for intervals.
    """
    by_last = np.argsort(last, kind="stable").tolist()
    ends = last.tolist()
    slots: list[int] = []
    free: list[int] = []
    num_ended = size = 0
    for tick in first.tolist():
        # Values whose last use is over free their slots.
        while num_ended < len(slots) and ends[by_last[num_ended]] < tick:
            free.append(slots[by_last[num_ended]])
            num_ended += 1
        if not free:
            free.append(size)
            size += 1
        slots.append(free.pop())
    return slots, size
