"""The plan of a schedule as one stage of the scheduled engine reads it: arrays to loop over, facts to compile by."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxpipe.pipeline.schedules._plan import EnginePhase, LockstepPlan

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
            phase.has_F, phase.has_head, phase.has_B, phase.has_W,
            embeds=bool((f_active & (plan.f_in_slot[ticks] < 0)).any()),
            embeds_backward=bool((b_active[:, 0] & (plan.b_chunk[ticks, 0] == 0)).any()),
            head_in_tick=bool((b_active & (plan.b_in_slot[ticks] < 0)).any()),
            stores_head_gradient=bool((plan.head_gradient_slot[ticks] >= 0).any()),
            same_tick=bool(same.any()),
            activations_arrive=bool((plan.arrive_f_slot[ticks] >= 0).any()),
            gradients_arrive=bool((plan.arrive_b_slot[ticks] >= 0).any()),
        )  # fmt: skip


def stage_rows(plan: LockstepPlan) -> Row:
    """The plan as this stage sees it, arrays [ticks]; slots of -1 become the scratch slot."""
    stage = lax.axis_index("stage")
    stores = {
        "f_in_slot": plan.num_activation_slots, "arrive_f_slot": plan.num_activation_slots,
        "residual_slot_f": plan.num_residual_slots, "residual_slot_b": plan.num_residual_slots,
        "b_in_slot": plan.num_gradient_slots, "arrive_b_slot": plan.num_gradient_slots,
        "residual_slot_w": plan.num_residual_slots,
        "stash_slot_b": plan.num_stash_slots, "stash_slot_w": plan.num_stash_slots,
    }  # fmt: skip
    columns = {name: np.where(getattr(plan, name) < 0, size, getattr(plan, name)) for name, size in stores.items()}
    for slot in "fbw":
        for name in (f"{slot}_microbatch", f"{slot}_chunk", f"{slot}_active"):
            columns[name] = getattr(plan, name)
    columns["f_embeds"] = plan.f_active & (plan.f_in_slot < 0)
    columns["b_from_head"] = plan.b_active & (plan.b_in_slot < 0)
    kept_by = np.full(plan.f_active.shape, plan.num_gradient_slots)
    kept_by[:, -1] = np.where(plan.head_gradient_slot < 0, plan.num_gradient_slots, plan.head_gradient_slot)
    columns["head_gradient_slot"] = kept_by
    rows = {name: jnp.asarray(a)[:, stage] for name, a in columns.items()}
    first_f = plan.f_active[:, 0] & (plan.f_in_slot[:, 0] < 0)
    first_b = plan.b_active[:, 0] & (plan.b_chunk[:, 0] == 0)
    rows["embed_f"] = jnp.asarray(np.where(first_f, plan.f_microbatch[:, 0], -1))
    rows["embed_b"] = jnp.asarray(np.where(first_b, plan.b_microbatch[:, 0], -1))
    rows["head_microbatch"] = jnp.asarray(plan.head_microbatch)
    return rows
