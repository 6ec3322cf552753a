"""Plan what each stage of the scheduled engine computes, reads, writes and receives in each tick.

`lockstep_plan` turns a schedule's table into arrays of indices that a compiled loop can walk
through. Letters: N ticks, S stages, M microbatches, V repeats.

A tick runs, in this order: the F slot, the head, the B slot (of full backwards, or of the I of
split ones), the W slot, then the transfers. With forwarding delay d the transfer of tick t carries
the F (B) output of tick t - (d-1) to the next (previous) stage of the ring. The receiving stage
writes it to a store at the end of tick t, and reads it from tick t + 1 on.

Every stage has four stores (see `schedules.slots`): arrived activations, arrived gradients,
residuals of the forward, and the stash between an I and its W. Each has one slot more than the
schedule needs. That last slot is the scratch slot: where a stage has nothing to read or write, its
index points there, so that every stage can read and write in every tick.

`LockstepPlan` is a pytree of these indices, so its views are tree maps:

    plan                        all ticks, all stages     leaves [N, S], and [N] where stages agree
    plan.ticks(start, stop)     a phase of it             leaves [n, S] and [n]
    plan.column(stage)          as one stage sees it      leaves [N]
    a step of `lax.scan`        one tick of one stage     scalars
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.pipeline.schedules.slots import Store, activation_slots
from maxpipe.pipeline.schedules.table import IDLE, ScheduleError, Table, Unit

PlanArray = np.ndarray | jax.Array  # NumPy in the plan, traced inside the program


class ForwardSlot(NamedTuple):
    """The F slot, [N, S] each: bool `active` and `embeds`, int32 the others.

    Attributes:
      active: whether there is a unit.
      microbatch, chunk: the unit; 0 if idle, which is always a legal index.
      embeds: whether the unit's input is the embedding; otherwise it is an arrived activation.
      reads: activation slot of the input.
      residuals: residual slot that the unit writes.
      arrival: activation slot that this tick's transfer fills, whatever the F slot does.
    """

    active: PlanArray
    microbatch: PlanArray
    chunk: PlanArray
    embeds: PlanArray
    reads: PlanArray
    residuals: PlanArray
    arrival: PlanArray


class BackwardSlot(NamedTuple):
    """The B slot, of units B or I, [N, S] each: bool `active` and `from_head`, int32 the others.

    Attributes:
      active, microbatch, chunk: the unit, as in `ForwardSlot`.
      from_head: whether the output's gradient comes from the head in this same tick;
        otherwise it is in the gradient store.
      reads: gradient slot of the output's gradient.
      residuals: residual slot that the unit reads.
      stash: stash slot that an I writes.
      arrival: gradient slot that this tick's transfer fills, whatever the B slot does.
    """

    active: PlanArray
    microbatch: PlanArray
    chunk: PlanArray
    from_head: PlanArray
    reads: PlanArray
    residuals: PlanArray
    stash: PlanArray
    arrival: PlanArray


class WeightSlot(NamedTuple):
    """The W slot, [N, S] each: bool `active`, int32 the others.

    Attributes:
      active, microbatch, chunk: the unit, as in `ForwardSlot`.
      residuals, stash: residual slot and stash slot that the unit reads.
    """

    active: PlanArray
    microbatch: PlanArray
    chunk: PlanArray
    residuals: PlanArray
    stash: PlanArray


class EndSlots(NamedTuple):
    """Embedding and head, int32; all stages share their work, so [N] but for `head_gradient`.

    Attributes:
      embed: microbatch that the first stage's F embeds in this tick; -1 if none.
      embed_backward: microbatch whose B reaches the embedding in this tick; -1 if none.
      head: microbatch whose last F runs in this tick, so that the head follows; -1 if none.
      head_gradient: [N, S], gradient slot of the last stage that stores the head's gradient at the
        end of this tick; the scratch slot if the B of this same tick takes it, and on all other
        stages.
    """

    embed: PlanArray
    embed_backward: PlanArray
    head: PlanArray
    head_gradient: PlanArray


class StoreSizes(NamedTuple):
    """Slots of each store on every stage; this number is also the index of its scratch slot."""

    activations: int
    gradients: int
    residuals: int
    stash: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LockstepPlan:
    """What every stage does in every tick: a pytree of indices, see the top of this module.

    Attributes:
      F, B, W, ends: the slots of a tick, and embedding and head.
      phases: runs of ticks (start, stop) that one loop can cover, in order, over all ticks.
      splits_backward: whether the B slot runs I units, and the W slot the W units.
    """

    F: ForwardSlot
    B: BackwardSlot
    W: WeightSlot
    ends: EndSlots
    sizes: StoreSizes = field(metadata={"static": True})
    phases: tuple[tuple[int, int], ...] = field(metadata={"static": True})
    splits_backward: bool = field(metadata={"static": True})

    def ticks(self, start: int, stop: int) -> "LockstepPlan":
        """Return ticks start ... stop - 1 of the plan."""
        return jax.tree.map(lambda a: a[start:stop], self)

    def column(self, stage: int | jax.Array) -> "LockstepPlan":
        """Return the plan as one stage sees it, leaves [N]; `stage` may be traced."""
        # [N, S] -> [N]; asarray, because NumPy arrays cannot be indexed by a traced stage.
        return jax.tree.map(lambda a: jnp.asarray(a)[:, stage] if a.ndim == 2 else a, self)

    # What happens in some tick of the plan (or of a phase of it) on some stage. It is known before
    # compilation, so that nothing else is compiled.

    @property
    def stores_head_gradient(self) -> bool:
        return bool((self.ends.head_gradient < self.sizes.gradients).any())

    @property
    def activations_arrive(self) -> bool:
        """Return whether some transfer brings an activation that will be read."""
        return bool((self.F.arrival < self.sizes.activations).any())

    @property
    def gradients_arrive(self) -> bool:
        """Return whether some transfer brings a gradient that will be read."""
        return bool((self.B.arrival < self.sizes.gradients).any())

    @property
    def reuses_residuals_in_tick(self) -> bool:
        """Return whether some B reads residuals that the F of its own tick writes."""
        # Idle slots also read and write the same slot, the scratch slot; that does not count.
        both = np.asarray(self.F.active) & np.asarray(self.B.active)
        return bool((both & (self.F.residuals == self.B.residuals)).any())


def lockstep_plan(table: Table) -> LockstepPlan:
    """Plan a valid table in loop placement with F and B, or F, I and W units; F alone to evaluate.

    Raises:
      ScheduleError: the table has both full and split backwards, or another placement.
    """
    if table.placement != "loop":
        raise _cannot_run(
            table, f"it places chunks as {table.placement!r}, the engine's ring only as 'loop'"
        )
    if "B" in table.kinds and "I" in table.kinds:
        raise _cannot_run(table, "it has both B and I units, and a slot of the engine runs either")
    backward = "I" if "I" in table.kinds else "B"
    stores = activation_slots(table)
    sizes = StoreSizes(
        stores.activations.size, stores.gradients.size, stores.residuals.size, stores.stash.size
    )
    activations, gradients = stores.activations, stores.gradients

    # 1. F slot. Only the first chunk of the model does not read the activation store. A value is
    # read at the end of its lifetime, and the transfer that brings it runs in the tick before.
    active, _, chunk = unit = _units(table, "F")
    f_slot = ForwardSlot(
        *unit,
        embeds=active & (table.global_chunk(chunk, np.arange(table.num_stages)) == 0),
        reads=_slots_at(table, activations, activations.last),
        residuals=_slots_of(table, stores.residuals, "F"),
        arrival=_slots_at(table, activations, activations.first - 1),
    )

    # 2. B slot. A gradient of the head is in the gradient store only if a later tick reads it.
    is_from_head = gradients.global_chunk == table.num_chunks - 1
    reads = _slots_at(table, gradients, gradients.last)
    unit = _units(table, backward)
    b_slot = BackwardSlot(
        *unit,
        from_head=unit[0] & (reads == sizes.gradients),
        reads=reads,
        residuals=_slots_of(table, stores.residuals, backward),
        stash=_slots_of(table, stores.stash, "I"),
        arrival=_slots_at(table, gradients, np.where(is_from_head, -1, gradients.first - 1)),
    )

    # 3. W slot. It reads the residuals a second time: an I frees none of them.
    w_slot = WeightSlot(
        *_units(table, "W"),
        residuals=_slots_of(table, stores.residuals, "W"),
        stash=_slots_of(table, stores.stash, "W"),
    )

    return LockstepPlan(
        F=f_slot,
        B=b_slot,
        W=w_slot,
        ends=_end_slots(table, f_slot, b_slot, gradients),
        sizes=sizes,
        phases=_phases(table),
        splits_backward=backward == "I",
    )


def _end_slots(
    table: Table, f_slot: ForwardSlot, b_slot: BackwardSlot, gradients: Store
) -> EndSlots:
    """Return what embedding and head do; stage 0 has the first chunk, the last stage the last."""
    # Stage 0 holds global chunk 0 as its repeat 0; the dx of that B belongs to the embedding.
    reaches_embedding = b_slot.active[:, 0] & (b_slot.chunk[:, 0] == 0)
    # The last F of a microbatch is that of the last global chunk, the last column of [M, G].
    head = np.full(table.num_ticks, -1, np.int32)
    head[table.ticks["F"][:, -1]] = np.arange(table.num_microbatches)
    # As a transfer does, the head writes at the end of the tick before the first that may read.
    is_from_head = gradients.global_chunk == table.num_chunks - 1
    return EndSlots(
        embed=np.where(f_slot.embeds[:, 0], f_slot.microbatch[:, 0], -1),
        embed_backward=np.where(reaches_embedding, b_slot.microbatch[:, 0], -1),
        head=head,
        head_gradient=_slots_at(table, gradients, np.where(is_from_head, gradients.first - 1, -1)),
    )


def _cannot_run(table: Table, why: str) -> ScheduleError:
    name = table.source or table.name
    remedy = "pipeline.engine=mpmd runs it"
    return ScheduleError(
        f"pipeline.schedule={name}: cannot run on the scheduled engine: {why}; {remedy}"
    )


def _slots_at(table: Table, store: Store, ticks: np.ndarray) -> np.ndarray:
    """Return int32 [N, S]: the slot of each of the store's values at its entry of `ticks`.

    Values whose tick is negative are left out. All other entries are the scratch slot.
    """
    slots = np.full((table.num_ticks, table.num_stages), store.size, np.int32)
    happens = ticks >= 0
    slots[ticks[happens], store.stage[happens]] = store.slot[happens]
    return slots


def _slots_of(table: Table, store: Store, kind: str) -> np.ndarray:
    """Return int32 [N, S]: the slot of each value at the tick in which the unit of `kind` runs."""
    if kind not in table.kinds:
        return np.full((table.num_ticks, table.num_stages), store.size, np.int32)
    return _slots_at(table, store, table.ticks[kind][store.microbatch, store.global_chunk])


def _units(table: Table, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return active, microbatch and chunk of one kind of slot, [N, S] each; 0 where idle."""
    # A table has no arrays for a kind that it never runs.
    idle = np.full((table.num_ticks, table.num_stages), IDLE, np.int32)
    microbatch, chunk = table.microbatch.get(kind, idle), table.chunk.get(kind, idle)
    return microbatch != IDLE, np.maximum(microbatch, 0), np.maximum(chunk, 0)


def _phases(table: Table) -> tuple[tuple[int, int], ...]:
    """Cut the ticks where the first and the last unit of each kind runs on any stage.

    A kind may pause in between. So there are at most seven phases, with a loop each to compile,
    however often a table alternates.
    """
    cuts = {0, table.num_ticks}
    for ticks in table.ticks.values():  # [M, G], -1 where there is no such unit
        cuts |= {int(ticks[ticks >= 0].min()), int(ticks.max()) + 1}
    return tuple(pairwise(sorted(cuts)))


def plan_text(plan: LockstepPlan) -> str:
    """Return the plan of all stages as text, a line for each tick and stage.

    A unit is `2F0`: global chunk, kind, microbatch. After the colon comes what it reads, after the
    arrow what it writes besides its output: slots `a0` of the activation store, `g0` of the
    gradient store, `r0` of the residual store and `s0` of the stash. The last column is what the
    tick's transfers fill.
    """
    num_ticks, num_stages = plan.F.active.shape
    lines = [f"{'tick':<5} {'stage':<6} {'slots':<56} receives"]
    for tick, stage in np.ndindex(num_ticks, num_stages):
        slots, arrivals = _cell_texts(plan, tick, stage, is_last=stage == num_stages - 1)
        label = tick if stage == 0 else ""
        text = f"{label:<5} {stage:<6} {'; '.join(slots) or 'idle':<56} {' '.join(arrivals)}"
        lines.append(text.rstrip())
    return "\n".join(lines)


def _cell_texts(
    plan: LockstepPlan, tick: int, stage: int, *, is_last: bool
) -> tuple[list[str], list[str]]:
    cell = jax.tree.map(lambda a: a[tick, stage] if a.ndim == 2 else a[tick], plan)
    f_slot, b_slot, w_slot, ends, sizes = cell.F, cell.B, cell.W, cell.ends, plan.sizes

    def unit(kind: str, slot: ForwardSlot | BackwardSlot | WeightSlot) -> Unit:
        return Unit(kind, int(slot.microbatch), int(slot.chunk) * plan.F.active.shape[1] + stage)

    texts = []
    if f_slot.active:
        source = "embedding" if f_slot.embeds else f"a{f_slot.reads}"
        target = f" -> r{f_slot.residuals}" if f_slot.residuals < sizes.residuals else ""
        texts.append(f"{unit('F', f_slot)}: {source}{target}")
    if ends.head >= 0 and is_last:
        is_stored = ends.head_gradient < sizes.gradients
        texts.append(f"head {ends.head}" + (f" -> g{ends.head_gradient}" if is_stored else ""))
    if b_slot.active:
        source = "head" if b_slot.from_head else f"g{b_slot.reads}"
        targets = [f"s{b_slot.stash}"] if plan.splits_backward else []
        targets += ["embedding"] if ends.embed_backward >= 0 and stage == 0 else []
        arrow = f" -> {' '.join(targets)}" if targets else ""
        kind = "I" if plan.splits_backward else "B"
        texts.append(f"{unit(kind, b_slot)}: {source} r{b_slot.residuals}{arrow}")
    if w_slot.active:
        texts.append(f"{unit('W', w_slot)}: r{w_slot.residuals} s{w_slot.stash}")
    arrivals = [f"a{f_slot.arrival}"] if f_slot.arrival < sizes.activations else []
    arrivals += [f"g{b_slot.arrival}"] if b_slot.arrival < sizes.gradients else []
    return texts, arrivals
