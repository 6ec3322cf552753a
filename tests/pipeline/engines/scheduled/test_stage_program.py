"""What is compiled for a stage: a loop per phase, with the slots and transfers that it uses."""

from collections import Counter

import jax
from helpers.engines import EngineUnderTest, make_batch, tiny

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr


def count(jaxpr):
    counts = Counter()
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for inner in inner_jaxprs(eqn):
            counts += count(open_jaxpr(inner))
    return counts


def phases(run, *args):
    (program,) = (
        e for e in jax.make_jaxpr(run)(*args).jaxpr.eqns if e.primitive.name == "shard_map"
    )
    (jaxpr,) = inner_jaxprs(program)
    return [
        open_jaxpr(inner)
        for e in open_jaxpr(jaxpr).eqns
        if e.primitive.name == "scan"
        for inner in inner_jaxprs(e)
    ]


def train_phases(words):
    common = "schedule=lockstep_1f1b num_repeats=2 num_microbatches=8 stage=2 fsdp=2"
    subject = EngineUnderTest(tiny(f"{common} {words}"))
    run = subject.pipeline.loss_and_gradients
    return [count(p) for p in phases(run, subject.params, make_batch(16), jax.random.key(0))]


def test_loops_of_lockstep_1f1b_have_the_slots_and_transfers_of_their_phase():
    """First F alone, then F, head and B, then B alone."""
    forward, both, backward = train_phases("skip_idle=false")
    assert [p["ppermute"] for p in (forward, both, backward)] == [1, 2, 1]
    # The head scatters tokens by all_to_all over stages; the embedding lies over stage and fsdp.
    assert forward["all_to_all"] == 1
    assert backward["all_to_all"] == 2
    assert both["all_to_all"] == 1 + 2 + 1
    assert both["dot_general"] > forward["dot_general"] + backward["dot_general"]


def test_conditionals_of_masked_slots_are_those_of_embedding_and_head():
    """Embedding, head and the embedding's gradient; skipping adds one around F and one around B."""
    masked = [p["cond"] for p in train_phases("skip_idle=false")]
    skipped = [p["cond"] for p in train_phases("skip_idle=true")]
    assert masked == [1, 3, 1]
    assert skipped == [2, 5, 2]


def test_loops_of_lockstep_zb_are_four_and_compute_no_product_twice():
    """F; F and I; F, I and W; I and W. W has seven products, one for each weight of a layer."""
    split = "schedule=lockstep_zb remat_policy=minimal"
    forward, both, every, backward = train_phases("skip_idle=false " + split)
    assert [p["ppermute"] for p in (forward, both, every, backward)] == [1, 2, 2, 1]
    assert every["dot_general"] - both["dot_general"] == 7
    full = train_phases("skip_idle=false remat_policy=minimal")
    assert every["dot_general"] == full[1]["dot_general"]
    assert backward["dot_general"] == full[2]["dot_general"]
    skipped = train_phases("skip_idle=true " + split)
    # No embedding and no gradient of it in the single tick of the second loop.
    assert [p["cond"] for p in skipped] == [2, 3, 6, 3]


def test_gathers_of_weights_are_in_the_slots_or_before_the_loops():
    per_iteration = train_phases("skip_idle=false")
    once = train_phases("skip_idle=false fsdp_gather=once")
    for before, after in zip(per_iteration, once, strict=True):
        assert (
            before["reduce_scatter"] + before["all_gather"]
            > after["reduce_scatter"] + after["all_gather"]
        )
    assert not any(phase["reduce_scatter"] for phase in once)
