"""What is compiled for a stage: one loop per phase, with the slots and transfers that the phase uses and no others."""

from collections import Counter

import jax
import jax.numpy as jnp
from helpers.engines import make_batch, make_mesh, tiny

from maxpipe.builder import build_engine_inputs
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine


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
    parts = build_engine_inputs(config, make_mesh(config))
    layers = parts.layout.shape
    params = {
        name: jax.tree.map(lambda s: jnp.zeros(s.shape), parts.program.specs[name])
        for name in ("embed", "head")
    }
    params["layers"] = jax.tree.map(
        lambda s: jnp.zeros(layers + s.shape), parts.program.specs["layers"]
    )
    return ScheduledEngine(parts), params


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
    (program,) = (
        e for e in jax.make_jaxpr(run)(*args).jaxpr.eqns if e.primitive.name == "shard_map"
    )
    (jaxpr,) = inner_jaxprs(program)
    return [inner for e in jaxpr.eqns if e.primitive.name == "scan" for inner in inner_jaxprs(e)]


def train_phases(**values):
    pipeline, params = make_pipeline(**values)
    return [
        count(p)
        for p in phases(pipeline.loss_and_gradients, params, make_batch(16), jax.random.key(0))
    ]


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


def test_split_backwards_have_four_loops_and_no_product_twice():
    """F; F and I; F, I and W; I and W. One layer per chunk: seven weights, and as many products in W."""
    split = {"pipeline.schedule": "lockstep_zb", "pipeline.remat_policy": "minimal"}
    forward, both, every, backward = train_phases(**{"pipeline.skip_idle": "false"} | split)
    assert [p["ppermute"] for p in (forward, both, every, backward)] == [1, 2, 2, 1]
    assert every["dot_general"] - both["dot_general"] == 7
    whole = train_phases(
        **{"pipeline.skip_idle": "false"} | split | {"pipeline.schedule": "lockstep_1f1b"}
    )
    assert every["dot_general"] == whole[1]["dot_general"]
    assert backward["dot_general"] == whole[2]["dot_general"]
    skipped = train_phases(**{"pipeline.skip_idle": "true"} | split)
    # No embedding and no gradient of it in the single tick of the second loop.
    assert [p["cond"] for p in skipped] == [2, 3, 6, 3]


def test_weights_are_gathered_in_the_slots_or_before_the_loops():
    per_iteration = train_phases(**{"pipeline.skip_idle": "false"})
    once = train_phases(**{"pipeline.skip_idle": "false", "pipeline.fsdp_gather": "once"})
    for before, after in zip(per_iteration, once, strict=True):
        assert (
            before["reduce_scatter"] + before["all_gather"]
            > after["reduce_scatter"] + after["all_gather"]
        )
    assert not any(phase["reduce_scatter"] for phase in once)


def test_evaluation_has_one_direction():
    pipeline, params = make_pipeline()
    loops = [count(p) for p in phases(pipeline.evaluate, params, make_batch(16))]
    assert all(loop["ppermute"] == 1 for loop in loops)
    assert not any(loop["reduce_scatter"] for loop in loops)
