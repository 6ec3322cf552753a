"""What a step waits for, by closed forms."""

import math

import jax
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, make_batch, tiny
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.devices.chips import LINK_EFFICIENCY
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.space import Grid
from maxpipe.plan.search.timing import step_seconds
from maxpipe.plan.search.units import units_of
from maxpipe.plan.search.waits import unit_waits, waits_of


def test_circular_sums_gradients_over_expert_in_every_iteration_or_once():
    machine = machine_of("v5p:2x2x2", 1, Config())
    experts = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 64}
    mesh = {"stage": 2, "data": 1, "expert": 2}

    def waits(gather):
        sizes = sizes_of("circular", "circular", mesh=mesh, fixed=experts, fsdp_gather=[gather])
        return waits_of(sizes, machine)

    each, once = waits("per_iteration"), waits("once")
    assert np.all(each.gradient > 0)
    assert np.all(once.gradient == 0)
    assert np.all(each.reduction < once.reduction)


def test_circular_sums_gradients_over_context_in_every_iteration_of_one_repeat():
    for repeats, in_units in ((1, True), (2, False)):
        machine = machine_of("v5p:2x2x2", 1, Config())
        choices = {"fsdp_gather": ["per_iteration"], "num_repeats": [repeats]}
        mesh = {"data": 1, "context": 2}
        fixed = {"data.sequence_length": 8}
        waits = waits_of(
            sizes_of("circular", "circular", mesh=mesh, fixed=fixed, **choices), machine
        )
        assert bool(np.all(waits.gradient > 0)) == in_units, (repeats, in_units)
        once = waits_of(
            sizes_of("scheduled", "lockstep_1f1b", mesh=mesh, fixed=fixed, **choices), machine
        )
        if not in_units:  # float32 sums of all layers, and those of embedding and head
            assert np.all(waits.reduction > 0.9 * once.reduction), (repeats, in_units)


def test_gradients_of_weights_that_fsdp_does_not_divide_are_summed_over_it():
    machine = machine_of("v5p:2x2x2", 1, Config())

    def waits(engine, embed):
        mesh = {"stage": 1 if engine == "sequential" else 2, "data": 1, "fsdp": 4}
        fixed = {"model.embed_dim": embed, "model.head_dim": 16}
        sizes = sizes_of(engine, "lockstep_1f1b", mesh=mesh, fixed=fixed)
        return float(np.ravel(waits_of(sizes, machine).reduction)[0])

    for engine in ("sequential", "scheduled"):
        assert waits(engine, 66) > 20 * waits(engine, 64)


def test_unrolled_layers_gather_as_often_as_xla_does():
    machine = machine_of("v5p:2x2x2", 1, Config())

    def waiting(scans, microbatches, policy):
        mesh = {"stage": 1, "data": 1, "fsdp": 8}
        choices = {"num_microbatches": [microbatches], "remat_policy": [policy]}
        sizes = sizes_of("sequential", "", mesh=mesh, scan_layers=[scans], **choices)
        waits = waits_of(sizes, machine)
        both = unit_waits(sizes, units_of(sizes, machine), waits)
        return [float(np.ravel(wait)[0]) for wait in both], float(np.ravel(waits.gather)[0])

    # Before a loop over microbatches, and for its backwards; and where nothing is computed again.
    shares = {(1, "full"): (1.0, 1.0), (4, "full"): (0.25, 0.0), (1, "none"): (1.0, 0.0)}
    for case, (forward, backward) in shares.items():
        (loop, gather), (unrolled, _) = waiting(True, *case), waiting(False, *case)
        spared = [(a - b) / gather for a, b in zip(loop, unrolled, strict=True)]
        assert spared == pytest.approx([1 - forward, 1 - backward]), case


def test_gradients_of_layers_without_stages_are_summed_over_all_axes_at_once():
    machine = machine_of("v5p:2x2x2", 1, Config())
    sizes = sizes_of("sequential", "", mesh={"stage": 1, "data": 2, "fsdp": 2})
    waits, grid = waits_of(sizes, machine), sizes.block.grid
    links = machine.links(grid)
    rate = sum(1 / machine.collective_cost(grid, links, axis) for axis in ("data", "fsdp"))
    # An all-reduce of whole gradients among four devices sends them one and a half times.
    expected = 1.5 * sizes.itemsize * sizes.parameters.layer_gathered / rate
    assert np.ravel(waits.scatter + waits.gradient) == pytest.approx(expected)


def test_gathers_along_a_whole_torus_take_two_steps_and_scatters_over_a_whole_slice_are_sums():
    for topology, size, gather, scatter in (
        # 3 parts of 64 over two links, then 60 over four; XLA sums whole gradients over six.
        ("v5p:4x4x4", 64, (3 / 2 + 60 / 4) / 64, 2 * 63 / 64 / 6),
        # Dimensions of two chips are not closed.
        ("v5p:2x2x2", 8, 7 / 8 / 3, 2 * 7 / 8 / 3),
        # Chips of two devices gather by sums of whole weights.
        ("tpu7x:4x4x4", 128, 2 * 127 / 128 / 6, 127 / 128 / 6),
        ("v6e:8x8", 64, 63 / 64 / 2, 2 * 63 / 64 / 2),
        ("v6e:2x4", 8, 7 / 8 / 2, 7 / 8 / 2),
        ("v5p:2x2x1", 4, 3 / 4 / 2, 3 / 4 / 2),
    ):
        machine = machine_of(topology, 1, Config())
        sizes = sizes_of(
            "sequential",
            "",
            mesh={"stage": 1, "data": 1, "fsdp": size},
            fixed={"model.embed_dim": 128},
            num_microbatches=[1],
        )
        waits = waits_of(sizes, machine)
        bandwidth = LINK_EFFICIENCY * machine.chip.link_bandwidth
        whole = sizes.itemsize * sizes.parameters.layer_gathered / bandwidth
        # Norms are never split.
        assert np.ravel(waits.gather / whole) == pytest.approx(gather, rel=0.01), (topology, size)
        assert np.ravel(waits.scatter / whole) == pytest.approx(scatter, rel=0.01), (topology, size)


def test_whole_arrays_are_summed_over_all_chips_of_each_slice_and_not_across_slices():
    machine = machine_of("v6e:4x4", 2, Config())
    within = Grid((1, 1, 16, 1, 1, 1), (2, 1, 1, 1, 1, 1))
    across = Grid((1, 1, 16, 1, 1, 1), (1, 1, 2, 1, 1, 1))
    part = Grid((2, 1, 8, 1, 1, 1), (2, 1, 1, 1, 1, 1))
    assert [machine.sums_whole(grid, "fsdp") for grid in (within, across, part)] == [
        True,
        False,
        False,
    ]


def test_circular_sums_along_a_whole_torus_are_of_whole_arrays_where_autodiff_makes_them():
    for gather, by_partitioner in (("per_iteration", True), ("once", False)):
        machine = machine_of("v5p:4x4x4", 1, Config())
        mesh = {"stage": 1, "data": 1, "fsdp": 64}
        sizes = sizes_of("circular", "gpipe", mesh=mesh, fsdp_gather=[gather])
        grid = sizes.block.grid
        links = machine.links(grid)
        whole = 2 * machine.collective_cost(grid, links, "fsdp")
        in_two_steps = machine.gather_cost(grid, links, "fsdp")
        assert in_two_steps < whole, (gather, by_partitioner)
        moved = sizes.itemsize * (sizes.parameters.layer_gathered - sizes.parameters.layer_at_rest)
        waits = waits_of(sizes, machine)
        expected = whole if by_partitioner else in_two_steps
        assert np.ravel(waits.scatter / moved) == pytest.approx(expected), (gather, by_partitioner)
        outer = sizes.parameters.embed_gathered + sizes.parameters.head_gathered
        outer = sizes.itemsize * (outer - sizes.parameters.outer_at_rest)
        assert np.ravel(waits.outer / outer) == pytest.approx(in_two_steps + whole)


def test_half_of_a_layers_gradients_are_scattered_when_nothing_else_computes():
    for schedule in ("lockstep_1f1b", "lockstep_zb"):
        machine = machine_of("v5p:2x2x2", 1, Config())
        # So many tokens that computation takes longer than all transfers.
        fixed = {
            "data.sequence_length": 4096,
            "model.mlp_dim": 64,
            "pipeline.fsdp_prefetch": "true",
        }
        choices = {"fsdp_gather": ["per_iteration"], "num_microbatches": [8]}
        mesh = {"data": 1, "fsdp": 2}
        sizes = sizes_of("scheduled", schedule, mesh=mesh, fixed=fixed, **choices)
        assert np.all(sizes.gathers_in_steps() == 1), schedule
        assert np.all(sizes.layers == 2), schedule
        waits = waits_of(sizes, machine)._replace(backward=0.0, gradient=0.0)
        backward = unit_waits(sizes, units_of(sizes, machine), waits)[1]
        assert np.ravel(backward) == pytest.approx(0.5 * float(np.ravel(waits.scatter)[0]))


def test_gradients_in_steps_leave_in_the_dtype_of_activations():
    """Every further step of a ring has a sum, which is float32."""

    def scatter(prefetch, ring):
        fixed = {"pipeline.fsdp_prefetch": prefetch, "model.dtype": "bfloat16"}
        choices = {"mesh": {"data": 1, "fsdp": ring}, "fsdp_gather": ["per_iteration"]}
        sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=fixed, **choices)
        return float(np.ravel(waits_of(sizes, machine_of("v5p:2x2x2", 1, Config())).scatter)[0])

    for ring, size in ((2, 2.0), (4, (2.0 + 4.0 + 4.0) / 3)):
        assert scatter("true", ring) / scatter("false", ring) == pytest.approx(size / 4.0)


def test_stages_in_other_slices_exchange_shards_of_the_head_and_parts_of_activations():
    for is_tied in (False, True):
        machine = machine_of("v5e:2x2", 2, Config())
        network = machine.chip.dcn_bandwidth
        mesh = {"stage": 2, "data": 1, "fsdp": 4}
        wide = {"model.vocab_size": 4096, "model.tie_embeddings": is_tied}
        within = sizes_of("scheduled", "lockstep_1f1b", mesh=mesh, fixed=wide)
        across = Grid((1, 1, 4, 1, 1, 1), (1, 2, 1, 1, 1, 1))
        sizes = BlockSizes(within.block._replace(grid=across), within.facts, None)
        waits = waits_of(sizes, machine)
        # Joined after the lookup, dealt before the head, and the gradients of both: half of each.
        activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
        assert np.ravel(waits.dealt) == pytest.approx(np.ravel(4 * activations / 2 / network))
        assert np.all(waits_of(within, machine_of("v5e:2x4", 1, Config())).dealt == 0), is_tied
        # A shard in the dtype of activations, and back a part of its gradient in float32.
        shard = sizes.config.model.vocab_size * sizes.config.model.embed_dim / 8
        parameters = sizes.parameters
        moved = parameters.embed_gathered + parameters.head_gathered - parameters.outer_at_rest
        links = machine.collective_cost(across, machine.links(across), "fsdp")
        expected = (sizes.itemsize + 4) * (shard / network + (moved - shard) * links)
        assert np.ravel(waits.outer) == pytest.approx(expected, rel=0.01), is_tied


def values_moved(program, shapes):
    """Count values of whole weights that a traced program gathers, and that it scatters."""
    gathered = scattered = 0
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_jaxprs(eqn):
            within = values_moved(inner, shapes)
            gathered, scattered = gathered + within[0], scattered + within[1]
        moved = eqn.outvars if eqn.primitive.name == "all_gather" else eqn.invars
        sizes = (v.aval.shape for v in moved if hasattr(v.aval, "shape"))
        values = sum(math.prod(n) for n in sizes if any(n[-len(s) :] == s for s in shapes))
        gathered += values * (eqn.primitive.name == "all_gather")
        scattered += values * (eqn.primitive.name == "reduce_scatter")
    return gathered, scattered


def transfers_of_outside_layers(gather, outside):
    """Return the values of weights that a lockstep step with so many of them moves."""
    layers = f"num_layers={4 + outside} parallel_layers=4 outside_layers=after"
    words = f"schedule=lockstep_1f1b stage=2 num_microbatches=4 fsdp=2 fsdp_gather={gather}"
    engine = EngineUnderTest(tiny(f"{words} {layers}"))
    shapes = [p.shape[3:] for p in jax.tree.leaves(engine.params["layers"]) if p.ndim > 4]
    step, key = engine.pipeline.loss_and_gradients, jax.random.key(0)
    traced = jax.make_jaxpr(step)(engine.params, make_batch(8), key)
    return np.array(values_moved(traced, shapes))


@pytest.mark.parametrize(("gather", "gathers"), [("per_iteration", 2), ("once", 1)])
def test_layers_outside_a_lockstep_pipeline_are_gathered_as_often_as_their_engine_does(
    gather, gathers
):
    """Forwards and backwards gather, and gradients are cut, for every microbatch or once."""
    in_program = transfers_of_outside_layers(gather, 2) - transfers_of_outside_layers(gather, 0)
    assert in_program[0] == gathers * in_program[1] > 0
    machine = machine_of("v5p:2x2x2", 1, Config())
    choices = {"num_microbatches": [8], "fsdp_gather": [gather], "remat_policy": ["full"]}
    mesh = {"stage": 4, "data": 1, "fsdp": 2}
    sizes = sizes_of("scheduled", "lockstep_1f1b", mesh=mesh, **choices)
    # All links, as embedding and head take them: weights there, and gradients back in float32.
    parameters, waits = sizes.parameters, waits_of(sizes, machine)
    ends = parameters.embed_gathered + parameters.head_gathered - parameters.outer_at_rest
    seconds = waits.outer / (ends * (sizes.itemsize + 4))  # of a byte
    moved = parameters.parts.layer_gathered - parameters.parts.outside_layer
    times = 8 if gather == "per_iteration" else 1
    expected = times * (gathers * sizes.itemsize + 4) * moved * seconds
    assert np.ravel(waits.outside) == pytest.approx(np.ravel(expected))
    with_three = BlockSizes(sizes.block._replace(outside=np.array([3])), sizes.facts, None)
    more = [np.ravel(step_seconds(s, machine).communication)[0] for s in (with_three, sizes)]
    assert more[0] - more[1] == pytest.approx(3 * np.ravel(expected)[0], rel=1e-6)


def test_circular_sums_whole_gradients_of_layers_outside_with_each_microbatch_of_a_stage():
    """So its program for simulated devices does; the weights are gathered once in any mode."""
    machine = machine_of("v5p:2x2x2", 1, Config())
    choices = {"num_microbatches": [8, 16, 24], "remat_policy": ["full"]}
    mesh = {"stage": 4, "data": 1, "fsdp": 2}
    sizes = sizes_of("circular", "circular", mesh=mesh, **choices)
    waits = np.ravel(waits_of(sizes, machine).outside)
    layer = sizes.parameters.parts.layer_gathered
    costs = [
        machine.collective_cost(sizes.block.grid, machine.links(sizes.block.grid), axis)
        for axis in ("fsdp", "stage")
    ]
    # Each of two microbatches more of a stage: a sum over eight devices by all links.
    one = sizes.itemsize * layer * 2 * 7 / 8 / sum(1 / cost for cost in costs)
    assert np.diff(waits) == pytest.approx(2 * one)
    assert waits[0] > 2 * one
