"""Sums of a chunk's gradients that go from neighbour to neighbour, and when they may start."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, tiny
from helpers.programs import loop_bodies
from jax.sharding import Mesh, PartitionSpec

from maxpipe.pipeline.engines.scheduled.carry import Carry
from maxpipe.pipeline.engines.scheduled.weight_transfers import WeightTransfers
from maxpipe.pipeline.jaxprs import CHECKPOINTS, ancestors, inner_jaxprs, open_jaxpr
from maxpipe.pipeline.manual import Gather

V, L, DEVICES = 2, 3, 2
SPEC = PartitionSpec("fsdp")


def gather():
    return Gather(SPEC, jnp.float32, jnp.bfloat16, manual=("fsdp",))


def added(names):
    transfers = WeightTransfers({name: gather() for name in [*names, "frozen"]}, {})
    slot = SimpleNamespace(active=jnp.bool_(True), chunk=jnp.int32(1))

    def add(totals, gradients):
        carry = Carry(**dict.fromkeys(Carry._fields) | {"layer_gradients": totals})
        layers = tuple({name: g[0, i] for name, g in gradients.items()} for i in range(L))
        layers = tuple(layer | {"frozen": None} for layer in layers)
        return transfers.add(carry, slot, layers).layer_gradients

    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    out = dict.fromkeys(names, PartitionSpec(None, None, "fsdp")) | {"frozen": None}
    return jax.shard_map(add, mesh=mesh, in_specs=(out, SPEC), out_specs=out, check_vma=False)


def operands(names):
    values = np.random.default_rng(0)
    totals = {name: values.standard_normal((V, L, 8, 2)).astype(np.float32) for name in names}
    gradients = {
        name: jnp.asarray(values.standard_normal((DEVICES, L, 8, 2)), jnp.bfloat16)
        for name in names
    }
    return totals | {"frozen": None}, gradients


@pytest.mark.parametrize(("names", "at_once"), [("abcd", 3), ("abc", 3), ("ab", 2), ("a", 1)])
def test_a_sum_starts_when_the_third_before_it_has_arrived(names, at_once):
    """With fewer parameters than three as many are on their way."""
    traced = jax.make_jaxpr(added(names))(*operands(names))
    (program,) = (open_jaxpr(p) for eqn in traced.eqns for p in inner_jaxprs(eqn))
    sends = [eqn for eqn in program.eqns if eqn.primitive.name == "ppermute"]
    assert len(sends) == len(names) * L
    for number, send in enumerate(sends):
        before = ancestors(program.eqns, send.invars)
        waits = [any(eqn is earlier for eqn in before) for earlier in sends[:number]]
        # With four, a total also waits for the sum of its own parameter in the layer after.
        assert waits[-at_once:] == [True] * (number >= at_once) + [False] * min(number, at_once - 1)


def traced(words):
    stages = "engine=scheduled schedule=lockstep_1f1b num_repeats=1 num_microbatches=3 stage=2 "
    return EngineUnderTest(tiny(f"{stages} fsdp=4 global_batch_size=48 {words}")).traced()


def loops_with(scope, words):
    for body in loop_bodies(traced(words)):
        conditionals = [
            eqn
            for eqn in body.eqns
            if eqn.primitive.name == "cond" and scope in str(eqn.source_info.name_stack).split("/")
        ]
        if conditionals:
            yield body, conditionals


@pytest.mark.parametrize("prefetch", [True, False])
def test_all_transfers_of_a_tick_arrive_before_the_gradient_of_the_embedding(prefetch, as_on_tpus):
    """A conditional with collectives: no transfer is on its way during it on a TPU."""
    waits = []
    words = f"skip_idle=false fsdp_prefetch={prefetch}".lower()
    for body, conditionals in loops_with("embedding", words):
        sends = [eqn for eqn in body.eqns if eqn.primitive.name == "ppermute"]
        backward = conditionals[-1]
        before = ancestors(body.eqns, backward.invars)
        arrived = [any(eqn is send for eqn in before) for send in sends]
        waits.append(bool(sends) and all(arrived))
    # In the loop of F alone the embedding comes first.
    assert waits == [False, prefetch, prefetch]


def gathers_in_layers(jaxpr, *, in_layer=False):
    """Count all-gathers in what `jax.checkpoint` wraps: the layers."""
    return sum(
        (in_layer and eqn.primitive.name == "all_gather")
        + sum(
            gathers_in_layers(
                open_jaxpr(inner), in_layer=in_layer or eqn.primitive.name in CHECKPOINTS
            )
            for inner in inner_jaxprs(eqn)
        )
        for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_layers_with_prefetch_gather_no_weights_of_their_own(prefetch):
    counted = gathers_in_layers(traced(f"fsdp_prefetch={prefetch}").jaxpr)
    assert (counted > 0) == (prefetch == "false")
