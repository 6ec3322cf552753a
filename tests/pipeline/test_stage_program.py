"""What is compiled for a stage: one loop per phase, with the slots and transfers that the phase uses and no others."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import make_batch, make_mesh, tiny

from maxpipe.builder import build_parts
from maxpipe.pipeline.scheduled import ScheduledPipeline
from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._plan import lockstep_plan
from maxpipe.pipeline.schedules._table import forward_only
from maxpipe.pipeline.stage_program import PhaseFacts


def make_pipeline(**values):
    config = tiny(
        **{
            "pipeline.schedule": "lockstep_1f1b",
            "pipeline.num_repeats": 2,
            "pipeline.num_microbatches": 8,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
        }
        | values
    )
    parts = build_parts(config, make_mesh(config))
    layers = parts.layout.shape
    params = {name: jax.tree.map(lambda s: jnp.zeros(s.shape), parts.program.specs[name]) for name in ("embed", "head")}
    params["layers"] = jax.tree.map(lambda s: jnp.zeros(layers + s.shape), parts.program.specs["layers"])
    return ScheduledPipeline(parts), params


def inner_jaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(getattr(item, "jaxpr", None), "eqns"):
                yield item.jaxpr


def count(jaxpr):
    """Primitives by name, loops and branches looked into."""
    found = Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += 1
        for inner in inner_jaxprs(eqn):
            found += count(inner)
    return found


def phases(run, *args):
    """The bodies of the loops over ticks."""
    (program,) = (e for e in jax.make_jaxpr(run)(*args).jaxpr.eqns if e.primitive.name == "shard_map")
    (jaxpr,) = inner_jaxprs(program)
    return [inner for e in jaxpr.eqns if e.primitive.name == "scan" for inner in inner_jaxprs(e)]


def train_phases(**values):
    pipeline, params = make_pipeline(**values)
    return [count(p) for p in phases(pipeline.loss_and_gradients, params, make_batch(16), jax.random.key(0))]


def test_three_loops_each_with_its_slots_and_transfers():
    """First F alone, then F, head and B, then B alone."""
    forward, both, backward = train_phases(**{"pipeline.skip_idle": "false"})
    assert [p["ppermute"] for p in (forward, both, backward)] == [1, 2, 1]
    # The head deals tokens out by all_to_all over stages; the embedding lies over stage and fsdp.
    assert forward["all_to_all"] == 1
    assert backward["all_to_all"] == 2
    assert both["all_to_all"] == 1 + 2 + 1
    assert both["dot_general"] > forward["dot_general"] + backward["dot_general"]


def test_masked_slots_leave_conditionals_on_the_tick_alone():
    """Embedding, head and the embedding's gradient; skipping adds one around F and one around B."""
    masked = [p["cond"] for p in train_phases(**{"pipeline.skip_idle": "false"})]
    skipped = [p["cond"] for p in train_phases(**{"pipeline.skip_idle": "true"})]
    assert masked == [1, 3, 1]
    assert skipped == [2, 5, 2]


def test_weights_are_gathered_in_the_slots_or_before_the_loops():
    per_iteration = train_phases(**{"pipeline.skip_idle": "false"})
    once = train_phases(**{"pipeline.skip_idle": "false", "pipeline.fsdp_gather": "once"})
    for before, after in zip(per_iteration, once, strict=True):
        assert before["reduce_scatter"] + before["all_gather"] > after["reduce_scatter"] + after["all_gather"]
    assert not any(phase["reduce_scatter"] for phase in once)


def test_evaluation_has_one_direction():
    pipeline, params = make_pipeline()
    loops = [count(p) for p in phases(pipeline.evaluate, params, make_batch(16))]
    assert all(loop["ppermute"] == 1 for loop in loops)
    assert not any(loop["reduce_scatter"] for loop in loops)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize(("S", "V", "M"), [(1, 1, 1), (1, 2, 3), (2, 1, 1), (2, 2, 5), (4, 2, 16), (4, 1, 3)])
def test_facts_of_phases(S, V, M, delay, slack):
    """What a tick of the plan does, its phase knows of."""
    table = SCHEDULES.get("lockstep_1f1b").build(S, M, V, forwarding_delay=delay, slack=slack)
    plan = lockstep_plan(table)
    for phase in plan.phases:
        facts = PhaseFacts.of(plan, phase)
        for t in range(phase.start, phase.stop):
            first_f = plan.f_active[t, 0] and plan.f_chunk[t, 0] == 0
            first_b = plan.b_active[t, 0] and plan.b_chunk[t, 0] == 0
            assert facts.has_F or not plan.f_active[t].any()
            assert facts.has_B or not plan.b_active[t].any()
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
    assert any(f.activations_arrive for f in every) == (S * V > 1)


def test_a_forward_plan_has_no_backward():
    plan = lockstep_plan(forward_only(SCHEDULES.get("lockstep_1f1b").build(4, 8, 2)))
    for phase in plan.phases:
        facts = PhaseFacts.of(plan, phase)
        needed = facts.has_B, facts.gradients_arrive, facts.stores_head_gradient, facts.head_in_tick
        assert facts.has_F
        assert not any(needed)
    np.testing.assert_array_equal(plan.head_used_at, -1)
