"""A table as the SPMD engine reads it: one row of indices per tick, one column per stage."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules._slots import Store, activation_slots
from maxpipe.pipeline.schedules._table import IDLE, ScheduleError, Table


class EnginePhase(NamedTuple):
    """Ticks [start, stop) that run the same slots; no stage has a unit in a slot that is off."""

    start: int
    stop: int
    has_F: bool
    has_head: bool
    has_B: bool


@dataclass(frozen=True, eq=False)
class LockstepPlan:
    """What every stage does in every tick; lifetimes of slots are those of `_slots`.

    A tick runs, in this order: the F slot, the head, the B slot, then the transfers. With forwarding delay d
    the transfer of tick t carries the F (B) output of tick t - (d-1) to the next (previous) stage of the
    ring, where it is written at the end of tick t and read from tick t + 1 on.

    int32 [N, S] unless said otherwise; N ticks, S stages. Slots are -1 where there is nothing to read or
    write; microbatches and chunks are 0 where the slot is idle, which is always a legal index.

    Attributes:
      f_microbatch, f_chunk: unit of the F slot; f_active: bool, whether there is one.
      f_in_slot: activation slot that F reads; -1 if it reads the embedding (or is idle).
      arrive_f_slot: activation slot that this tick's transfer fills on this stage.
      residual_slot_f: residual slot that F writes.
      b_microbatch, b_chunk, b_active: unit of the B slot.
      b_in_slot: gradient slot that B reads; -1 if it takes this tick's head gradient (or is idle).
      arrive_b_slot: gradient slot that this tick's transfer fills on this stage.
      residual_slot_b: residual slot that B reads.
      head_microbatch: int32 [N], microbatch whose last chunk runs its F in this tick, so that the head
        follows; -1 if none.
      head_used_at: int32 [N], tick of the B that uses the head's gradient; -1 if none.
      head_gradient_slot: int32 [N], gradient slot of the last stage that keeps the head's gradient from the
        end of this tick on; -1 if the B of this same tick takes it (or there is none).
      num_activation_slots, num_gradient_slots, num_residual_slots: store sizes, without a scratch slot.
      phases: in order, covering all ticks; at most five.
    """

    f_microbatch: np.ndarray
    f_chunk: np.ndarray
    f_active: np.ndarray
    f_in_slot: np.ndarray
    arrive_f_slot: np.ndarray
    residual_slot_f: np.ndarray
    b_microbatch: np.ndarray
    b_chunk: np.ndarray
    b_active: np.ndarray
    b_in_slot: np.ndarray
    arrive_b_slot: np.ndarray
    residual_slot_b: np.ndarray
    head_microbatch: np.ndarray
    head_used_at: np.ndarray
    head_gradient_slot: np.ndarray
    num_activation_slots: int
    num_gradient_slots: int
    num_residual_slots: int
    phases: list[EnginePhase]


def lockstep_plan(table: Table) -> LockstepPlan:
    """Plans a valid table for the scheduled engine.

    Args:
      table: loop placement, F and B units (or F alone, to evaluate).

    Raises:
      ScheduleError: the table has split backwards or another placement.
    """
    if table.placement != "loop":
        raise _cannot_run(table, f"it places chunks as {table.placement!r}, the engine's ring only as 'loop'")
    if split := [k for k in table.kinds if k in "IW"]:
        raise _cannot_run(table, f"it has {' and '.join(split)} units, the engine runs whole B units only")
    stores = activation_slots(table)
    from_head = stores.gradients.global_chunk == table.num_chunks - 1
    arrive_f, f_in = _mark(table, stores.activations, landing=1)
    arrive_b, _ = _mark(table, stores.gradients, landing=1, only=~from_head)
    _, b_in = _mark(table, stores.gradients, landing=1)
    residual_f, residual_b = _mark(table, stores.residuals, landing=0)
    f_active, f_microbatch, f_chunk = _slot_units(table, "F")
    b_active, b_microbatch, b_chunk = _slot_units(table, "B")
    head_microbatch, head_used_at, head_gradient_slot = np.full((3, table.num_ticks), -1, np.int32)
    head_ticks = table.ticks["F"][:, -1]
    head_microbatch[head_ticks] = np.arange(table.num_microbatches)
    if "B" in table.kinds:
        head_used_at[head_ticks] = table.ticks["B"][:, -1]
    head_gradient_slot[stores.gradients.first[from_head] - 1] = stores.gradients.slot[from_head]
    return LockstepPlan(
        f_microbatch,
        f_chunk,
        f_active,
        f_in,
        arrive_f,
        residual_f,
        b_microbatch,
        b_chunk,
        b_active,
        b_in,
        arrive_b,
        residual_b,
        head_microbatch,
        head_used_at,
        head_gradient_slot,
        stores.activations.size,
        stores.gradients.size,
        stores.residuals.size,
        _engine_phases(f_active, b_active, head_microbatch),
    )


def _cannot_run(table: Table, why: str) -> ScheduleError:
    name = table.source or table.name
    remedy = "pipeline.engine=mpmd runs it"
    return ScheduleError(f"pipeline.schedule={name}: cannot run on the scheduled engine: {why}; {remedy}")


def _mark(
    table: Table, store: Store, landing: int, only: np.ndarray | slice = slice(None)
) -> tuple[np.ndarray, np.ndarray]:
    """Slots written and read, both int32 [N, S]; values land `landing` ticks before their lifetime starts."""
    write, read = (np.full((table.num_ticks, table.num_stages), -1, np.int32) for _ in range(2))
    write[store.first[only] - landing, store.stage[only]] = store.slot[only]
    read[store.last[only], store.stage[only]] = store.slot[only]
    return write, read


def _slot_units(table: Table, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Active, microbatch and chunk of one kind of slot, [N, S] each, legal indices everywhere."""
    idle = np.full((table.num_ticks, table.num_stages), IDLE, np.int32)
    microbatch, chunk = table.microbatch.get(kind, idle), table.chunk.get(kind, idle)
    return microbatch != IDLE, np.maximum(microbatch, 0), np.maximum(chunk, 0)


def _engine_phases(
    f_active: np.ndarray, b_active: np.ndarray, head_microbatch: np.ndarray
) -> list[EnginePhase]:
    """Cuts where the first and last F and B of any stage run: few phases, so few loops to compile."""
    runs = {}
    for name, active in (("F", f_active.any(1)), ("B", b_active.any(1))):
        ticks = np.flatnonzero(active)
        runs[name] = (int(ticks[0]), int(ticks[-1]) + 1) if len(ticks) else (0, 0)
    cuts = sorted({0, len(f_active), *runs["F"], *runs["B"]})
    return [
        EnginePhase(
            start,
            stop,
            runs["F"][0] <= start < runs["F"][1],
            bool((head_microbatch[start:stop] >= 0).any()),
            runs["B"][0] <= start < runs["B"][1],
        )
        for start, stop in pairwise(cuts)
    ]
