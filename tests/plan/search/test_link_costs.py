"""What a byte costs along the axes of a mesh."""

import pytest

from maxpipe.config import Config
from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import LINK_EFFICIENCY
from maxpipe.plan.links import link_costs
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.space import Grid


def axes(**sizes):
    return tuple(sizes.get(axis, 1) for axis in MESH_AXES)


def costs_on(topology, **sizes):
    machine = machine_of(topology, 1, Config())
    link = LINK_EFFICIENCY * machine.chip.link_bandwidth
    return link_costs(machine, Grid(axes(**sizes), axes())), link


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
