"""What a byte costs along the axes of a mesh."""

import pytest

from maxpipe.config import Config
from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import LINK_EFFICIENCY
from maxpipe.plan.links import link_costs
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.space import Grid

ALONE = (1,) * len(MESH_AXES)


def axes(**sizes):
    return tuple(sizes.get(axis, 1) for axis in MESH_AXES)


def costs_on(topology, slices=1, dcn=ALONE, **sizes):
    """Return the costs on a mesh, and how many bytes a link sends in a second."""
    machine = machine_of(topology, slices, Config())
    link = LINK_EFFICIENCY * machine.chip.link_bandwidth
    return link_costs(machine, Grid(axes(**sizes), dcn)), link


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
        costs, link = costs_on(topology, fsdp=size)
        others = (size - 1) / size  # parts that a device does not have
        assert others * costs.gather * link == pytest.approx(gather), topology
        assert others * costs.scatter(by_partitioner=1.0) * link == pytest.approx(scatter), topology


def test_whole_arrays_are_summed_over_all_chips_of_each_slice_and_not_across_slices():
    for dcn, sizes, is_whole in (
        (axes(data=2), {"fsdp": 16}, True),
        (axes(fsdp=2), {"fsdp": 16}, False),
        (axes(data=2), {"data": 2, "fsdp": 8}, False),
    ):
        costs, _ = costs_on("v6e:4x4", 2, dcn, **sizes)
        assert costs.sums_whole == is_whole, sizes


def test_devices_of_a_chip_in_groups_of_their_own_share_its_links():
    for sizes, axis, links, each in (
        ({"fsdp": 8, "tensor": 2}, "fsdp", 2, 1),  # both devices of a chip are in a group
        ({"fsdp": 8, "tensor": 2}, "tensor", 1, 2),  # those of a chip are in two groups
        ({"stage": 2, "fsdp": 8}, "fsdp", 3, 2),
        ({"fsdp": 16}, "fsdp", 3, 1),
    ):
        costs, link = costs_on("tpu7x:2x2x2", **sizes)
        assert costs.of(axis) == pytest.approx(each / (links * link)), (sizes, axis)
    for sizes, each in (({"stage": 2, "tensor": 8}, 1), ({"data": 2, "stage": 4, "fsdp": 2}, 2)):
        costs, link = costs_on("tpu7x:2x2x2", **sizes)
        assert costs.permute == pytest.approx(each / link)


def test_devices_of_a_chip_share_its_part_of_the_network_between_slices():
    for topology, each in (("v5p:2x2x1", 1), ("tpu7x:2x2x1", 2)):
        machine = machine_of(topology, 2, Config())
        costs, _ = costs_on(topology, 2, axes(stage=2))
        assert costs.permute == pytest.approx(each / machine.chip.dcn_bandwidth)
