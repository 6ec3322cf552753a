"""A table as the SPMD engine reads it: one row of indices per tick, one column per stage.

The plan of a schedule as one stage of the scheduled engine reads it: arrays to loop over, facts to
compile by."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxpipe.pipeline.schedules.slots import Store, activation_slots
from maxpipe.pipeline.schedules.table import IDLE, ScheduleError, Table


class EnginePhase(NamedTuple):
    """Ticks [start, stop) that run the same slots; no stage has a unit in a slot that is off."""

    start: int
    stop: int
    has_F: bool
    has_head: bool
    has_B: bool
    has_W: bool


@dataclass(frozen=True, eq=False)
class LockstepPlan:
    """What every stage does in every tick; lifetimes of slots are those of `_slots`.

    A tick runs, in this order: the F slot, the head, the B slot (for the I of a split backward),
    the W slot, then the transfers. With forwarding delay d the transfer of tick t carries the F (B)
    output of tick t - (d-1) to the next (previous) stage of the ring, where it is written at the
    end of tick t and read from tick t + 1 on.

    int32 [N, S] unless said otherwise; N ticks, S stages. Slots are -1 where there is nothing to
    read or write; microbatches and chunks are 0 where the slot is idle, which is always a legal
    index.

    Attributes:
      f_microbatch, f_chunk: unit of the F slot; f_active: bool, whether there is one.
      f_in_slot: activation slot that F reads; -1 if it reads the embedding (or is idle).
      arrive_f_slot: activation slot that this tick's transfer fills on this stage.
      residual_slot_f: residual slot that F writes.
      b_microbatch, b_chunk, b_active: unit of the B slot.
      b_in_slot: gradient slot that B reads; -1 if it takes this tick's head gradient (or is idle).
      arrive_b_slot: gradient slot that this tick's transfer fills on this stage.
      residual_slot_b: residual slot that B reads.
      stash_slot_b: stash slot that B writes if it is an I.
      w_microbatch, w_chunk, w_active: unit of the W slot.
      residual_slot_w, stash_slot_w: residual and stash slot that W reads.
      head_microbatch: int32 [N], microbatch whose last chunk runs its F in this tick, so that the
        head follows; -1 if none.
      head_used_at: int32 [N], tick of the B that uses the head's gradient; -1 if none.
      head_gradient_slot: int32 [N], gradient slot of the last stage that keeps the head's gradient
        from the end of this tick on; -1 if the B of this same tick takes it (or there is none).
      num_activation_slots, num_gradient_slots, num_residual_slots, num_stash_slots: store sizes,
        without a scratch slot.
      splits_backward: whether the B slot is one for I units.
      phases: in order, covering all ticks; at most seven.
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
    stash_slot_b: np.ndarray
    w_microbatch: np.ndarray
    w_chunk: np.ndarray
    w_active: np.ndarray
    residual_slot_w: np.ndarray
    stash_slot_w: np.ndarray
    head_microbatch: np.ndarray
    head_used_at: np.ndarray
    head_gradient_slot: np.ndarray
    num_activation_slots: int
    num_gradient_slots: int
    num_residual_slots: int
    num_stash_slots: int
    splits_backward: bool
    phases: list[EnginePhase]


def lockstep_plan(table: Table) -> LockstepPlan:
    """Plans a valid table for the scheduled engine.

    Args:
      table: loop placement; F and B units, or F, I and W units (or F alone, to evaluate).

    Raises:
      ScheduleError: the table has both whole and split backwards, or another placement.
    """
    if table.placement != "loop":
        raise _cannot_run(
            table, f"it places chunks as {table.placement!r}, the engine's ring only as 'loop'"
        )
    if "B" in table.kinds and "I" in table.kinds:
        raise _cannot_run(table, "it has both B and I units, and a slot of the engine runs either")
    stores = activation_slots(table)
    from_head = stores.gradients.global_chunk == table.num_chunks - 1
    f_active, f_microbatch, f_chunk = _slot_units(table, "F")
    backward = "I" if "I" in table.kinds else "B"
    b_active, b_microbatch, b_chunk = _slot_units(table, backward)
    w_active, w_microbatch, w_chunk = _slot_units(table, "W")
    head_microbatch, head_used_at, head_gradient_slot = np.full((3, table.num_ticks), -1, np.int32)
    head_ticks = table.ticks["F"][:, -1]
    head_microbatch[head_ticks] = np.arange(table.num_microbatches)
    if backward in table.kinds:
        head_used_at[head_ticks] = table.ticks[backward][:, -1]
    head_gradient_slot[stores.gradients.first[from_head] - 1] = stores.gradients.slot[from_head]
    return LockstepPlan(
        f_microbatch=f_microbatch,
        f_chunk=f_chunk,
        f_active=f_active,
        f_in_slot=_slots_at(table, stores.activations, stores.activations.last),
        arrive_f_slot=_slots_at(table, stores.activations, stores.activations.first - 1),
        residual_slot_f=_slots_of(table, stores.residuals, "F"),
        b_microbatch=b_microbatch,
        b_chunk=b_chunk,
        b_active=b_active,
        b_in_slot=_slots_at(table, stores.gradients, stores.gradients.last),
        arrive_b_slot=_slots_at(
            table, stores.gradients, np.where(from_head, -1, stores.gradients.first - 1)
        ),
        residual_slot_b=_slots_of(table, stores.residuals, backward),
        stash_slot_b=_slots_of(table, stores.stash, "I"),
        w_microbatch=w_microbatch,
        w_chunk=w_chunk,
        w_active=w_active,
        residual_slot_w=_slots_of(table, stores.residuals, "W"),
        stash_slot_w=_slots_of(table, stores.stash, "W"),
        head_microbatch=head_microbatch,
        head_used_at=head_used_at,
        head_gradient_slot=head_gradient_slot,
        num_activation_slots=stores.activations.size,
        num_gradient_slots=stores.gradients.size,
        num_residual_slots=stores.residuals.size,
        num_stash_slots=stores.stash.size,
        splits_backward=backward == "I",
        phases=_engine_phases(f_active, b_active, w_active, head_microbatch),
    )


def _cannot_run(table: Table, why: str) -> ScheduleError:
    name = table.source or table.name
    remedy = "pipeline.engine=mpmd runs it"
    return ScheduleError(
        f"pipeline.schedule={name}: cannot run on the scheduled engine: {why}; {remedy}"
    )


def _slots_at(table: Table, store: Store, ticks: np.ndarray) -> np.ndarray:
    """int32 [N, S]: where each of the store's values is, at its tick of `ticks`; -1 leaves it out."""
    found, there = np.full((table.num_ticks, table.num_stages), -1, np.int32), ticks >= 0
    found[ticks[there], store.stage[there]] = store.slot[there]
    return found


def _slots_of(table: Table, store: Store, kind: str) -> np.ndarray:
    """int32 [N, S]: where the values of the units of a kind are, at the tick of each unit."""
    if kind not in table.kinds:
        return np.full((table.num_ticks, table.num_stages), -1, np.int32)
    return _slots_at(table, store, table.ticks[kind][store.microbatch, store.global_chunk])


def _slot_units(table: Table, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Active, microbatch and chunk of one kind of slot, [N, S] each, legal indices everywhere."""
    idle = np.full((table.num_ticks, table.num_stages), IDLE, np.int32)
    microbatch, chunk = table.microbatch.get(kind, idle), table.chunk.get(kind, idle)
    return microbatch != IDLE, np.maximum(microbatch, 0), np.maximum(chunk, 0)


def _engine_phases(
    f_active: np.ndarray, b_active: np.ndarray, w_active: np.ndarray, head_microbatch: np.ndarray
) -> list[EnginePhase]:
    """Cuts where the first and last unit of each slot run on any stage: few phases, so few loops to compile."""
    runs = []
    for active in (f_active, b_active, w_active):
        ticks = np.flatnonzero(active.any(axis=1))
        runs.append(range(int(ticks[0]), int(ticks[-1]) + 1) if len(ticks) else range(0))
    cuts = sorted({0, len(f_active), *(cut for run in runs for cut in (run.start, run.stop))})
    return [
        EnginePhase(
            start,
            stop,
            start in runs[0],
            bool((head_microbatch[start:stop] >= 0).any()),
            start in runs[1],
            start in runs[2],
        )
        for start, stop in pairwise(cuts)
    ]


Row = dict[str, jax.Array]


@dataclass(frozen=True)
class PhaseFacts:
    """What can happen in a phase, known before compilation, so that nothing else is compiled.

    Attributes:
      has_F, has_head, has_B, has_W: slots in use.
      embeds: some F reads the embedding; embeds_backward: some B ends there.
      head_in_tick: some B takes the gradient that the head computes in the same tick.
      stores_head_gradient: some head gradient is kept for a later tick.
      same_tick: some B reads residuals that the F of its own tick writes.
      activations_arrive, gradients_arrive: some transfer brings what will be read.
    """

    has_F: bool
    has_head: bool
    has_B: bool
    has_W: bool
    embeds: bool
    embeds_backward: bool
    head_in_tick: bool
    stores_head_gradient: bool
    same_tick: bool
    activations_arrive: bool
    gradients_arrive: bool

    @classmethod
    def of(cls, plan: LockstepPlan, phase: EnginePhase) -> "PhaseFacts":
        ticks = slice(phase.start, phase.stop)
        f_active, b_active = plan.f_active[ticks], plan.b_active[ticks]
        same = (plan.residual_slot_f[ticks] == plan.residual_slot_b[ticks]) & f_active & b_active
        return cls(
            phase.has_F,
            phase.has_head,
            phase.has_B,
            phase.has_W,
            embeds=bool((f_active & (plan.f_in_slot[ticks] < 0)).any()),
            embeds_backward=bool((b_active[:, 0] & (plan.b_chunk[ticks, 0] == 0)).any()),
            head_in_tick=bool((b_active & (plan.b_in_slot[ticks] < 0)).any()),
            stores_head_gradient=bool((plan.head_gradient_slot[ticks] >= 0).any()),
            same_tick=bool(same.any()),
            activations_arrive=bool((plan.arrive_f_slot[ticks] >= 0).any()),
            gradients_arrive=bool((plan.arrive_b_slot[ticks] >= 0).any()),
        )


def stage_rows(plan: LockstepPlan) -> Row:
    """The plan as this stage sees it, arrays [ticks]; slots of -1 become the scratch slot."""
    stage = lax.axis_index("stage")
    stores = {
        "f_in_slot": plan.num_activation_slots,
        "arrive_f_slot": plan.num_activation_slots,
        "residual_slot_f": plan.num_residual_slots,
        "residual_slot_b": plan.num_residual_slots,
        "b_in_slot": plan.num_gradient_slots,
        "arrive_b_slot": plan.num_gradient_slots,
        "residual_slot_w": plan.num_residual_slots,
        "stash_slot_b": plan.num_stash_slots,
        "stash_slot_w": plan.num_stash_slots,
    }
    columns = {
        name: np.where(getattr(plan, name) < 0, size, getattr(plan, name))
        for name, size in stores.items()
    }
    for slot in "fbw":
        for name in (f"{slot}_microbatch", f"{slot}_chunk", f"{slot}_active"):
            columns[name] = getattr(plan, name)
    columns["f_embeds"] = plan.f_active & (plan.f_in_slot < 0)
    columns["b_from_head"] = plan.b_active & (plan.b_in_slot < 0)
    kept_by = np.full(plan.f_active.shape, plan.num_gradient_slots)
    kept_by[:, -1] = np.where(
        plan.head_gradient_slot < 0, plan.num_gradient_slots, plan.head_gradient_slot
    )
    columns["head_gradient_slot"] = kept_by
    rows = {name: jnp.asarray(a)[:, stage] for name, a in columns.items()}
    first_f = plan.f_active[:, 0] & (plan.f_in_slot[:, 0] < 0)
    first_b = plan.b_active[:, 0] & (plan.b_chunk[:, 0] == 0)
    rows["embed_f"] = jnp.asarray(np.where(first_f, plan.f_microbatch[:, 0], -1))
    rows["embed_b"] = jnp.asarray(np.where(first_b, plan.b_microbatch[:, 0], -1))
    rows["head_microbatch"] = jnp.asarray(plan.head_microbatch)
    return rows
