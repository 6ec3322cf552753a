"""What a step waits for, by closed forms."""

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.devices.chips import LINK_EFFICIENCY
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.space import Grid
from maxpipe.plan.search.unit_seconds import units_of
from maxpipe.plan.search.waits import unit_waits, waits_of


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


def test_copies_sum_gradients_in_units_of_a_differentiated_loop_or_once_a_step():
    machine = machine_of("v5p:2x2x2", 1, Config())
    for engine, gather, in_units in (
        ("circular", "per_iteration", True),
        ("circular", "once", False),
        ("scheduled", "per_iteration", False),
    ):
        schedule = "circular" if engine == "circular" else "lockstep_1f1b"
        sizes = sizes_of(engine, schedule, fsdp_gather=[gather])
        waits, parameters = waits_of(sizes, machine), sizes.parameters
        links = machine.links(sizes.block.grid)
        # Among two copies an all-reduce sends as many bytes as there are.
        second = machine.collective_cost(sizes.block.grid, links, "data")
        of_unit = in_units * sizes.itemsize * parameters.layer_at_rest * second
        of_step = parameters.outer_at_rest if in_units else parameters.at_rest
        assert np.ravel(waits.gradient) == pytest.approx(of_unit), (engine, gather)
        assert np.ravel(waits.reduction) == pytest.approx(4 * of_step * second), (engine, gather)
