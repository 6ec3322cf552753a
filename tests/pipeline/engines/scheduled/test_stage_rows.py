"""What is known of a phase before it is compiled."""

import numpy as np
import pytest

from maxpipe.pipeline.engines.scheduled.plan import PhaseFacts, lockstep_plan
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import forward_only


@pytest.mark.parametrize("name", ["lockstep_1f1b", "lockstep_zb"])
@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize(
    ("S", "V", "M"), [(1, 1, 1), (1, 2, 3), (2, 1, 1), (2, 2, 5), (4, 2, 16), (4, 1, 3)]
)
def test_facts_of_phases(name, S, V, M, delay, slack):
    """What a tick of the plan does, its phase knows of."""
    table = load_schedule(name, S, M, V, forwarding_delay=delay, slack=slack)
    plan = lockstep_plan(table)
    for phase in plan.phases:
        facts = PhaseFacts.of(plan, phase)
        for t in range(phase.start, phase.stop):
            first_f = plan.f_active[t, 0] and plan.f_chunk[t, 0] == 0
            first_b = plan.b_active[t, 0] and plan.b_chunk[t, 0] == 0
            assert facts.has_F or not plan.f_active[t].any()
            assert facts.has_B or not plan.b_active[t].any()
            assert facts.has_W or not plan.w_active[t].any()
            assert facts.has_head or plan.head_microbatch[t] < 0
            assert facts.embeds or not first_f
            assert facts.embeds_backward or not first_b
            assert facts.activations_arrive or (plan.arrive_f_slot[t] < 0).all()
            assert facts.gradients_arrive or (plan.arrive_b_slot[t] < 0).all()
            used_now = plan.head_used_at[t] == t and plan.head_microbatch[t] >= 0
            assert facts.head_in_tick or not used_now
            assert facts.stores_head_gradient or plan.head_gradient_slot[t] < 0
    every = [PhaseFacts.of(plan, phase) for phase in plan.phases]
    heads = np.flatnonzero(plan.head_microbatch >= 0)
    waits = plan.head_used_at[heads] > heads
    assert slack == 0 or waits.all()
    assert any(f.stores_head_gradient for f in every) == waits.any()
    assert any(f.head_in_tick for f in every) == (not waits.all())
    assert any(f.same_tick for f in every) == (not waits.all())
    assert any(f.has_W for f in every) == (name == "lockstep_zb")
    assert any(f.activations_arrive for f in every) == (S * V > 1)


def test_a_forward_plan_has_no_backward():
    plan = lockstep_plan(forward_only(load_schedule("lockstep_1f1b", 4, 8, 2)))
    for phase in plan.phases:
        facts = PhaseFacts.of(plan, phase)
        needed = (
            facts.has_B,
            facts.has_W,
            facts.gradients_arrive,
            facts.stores_head_gradient,
            facts.head_in_tick,
        )
        assert facts.has_F
        assert not any(needed)
    np.testing.assert_array_equal(plan.head_used_at, -1)
