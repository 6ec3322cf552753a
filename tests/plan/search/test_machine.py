"""Machines that topologies name, and those that are not priced."""

import pytest

from maxpipe.config import Config, replace
from maxpipe.config.sections import MESH_AXES
from maxpipe.plan.search.machine import MOST_SIMULATED, machine_of
from maxpipe.plan.search.space import Grid


def test_machines_without_a_price_are_refused_with_those_that_have_one():
    for topology, slices, words in (
        ("H100:8", 8, ["H100:8 is one machine", "compile.num_slices=8"]),
        ("cpu:8", 2, ["cpu:8 is one machine", "compile.num_slices=2"]),
        ("H100:9", 1, ["at most 8 GPUs", "between hosts has no price"]),
        (f"cpu:{MOST_SIMULATED + 1}", 1, [f"at most {MOST_SIMULATED} simulated devices"]),
        ("L4:8", 1, ["'L4:8'", "A100, H100, H200, B200", "v5p:4x4x4"]),
    ):
        with pytest.raises(ValueError, match=r"give|leave it out|did you mean") as caught:
            machine_of(topology, slices, Config())
        assert [word for word in words if word not in str(caught.value)] == [], (topology, slices)


def test_machine_of_gpus_and_simulated_devices_is_one_host():
    simulated = replace(Config(), **{"mesh.simulated_devices": 6})
    for topology, devices in (("h100:8", 8), ("cpu:4", 4), ("cpu", 6)):
        machine = machine_of(topology, 1, simulated)
        assert (machine.devices, machine.slices, machine.hosts) == (devices, 1, 1)


def test_devices_of_a_chip_in_groups_of_their_own_share_its_links():
    for sizes, axis, links, each in (
        ({"fsdp": 8, "tensor": 2}, "fsdp", 2, 1),  # both devices of a chip are in a group
        ({"fsdp": 8, "tensor": 2}, "tensor", 1, 2),  # those of a chip are in two groups
        ({"stage": 2, "fsdp": 8}, "fsdp", 3, 2),
        ({"fsdp": 16}, "fsdp", 3, 1),
    ):
        machine = machine_of("tpu7x:2x2x2", 1, Config())
        grid = Grid(tuple(sizes.get(a, 1) for a in MESH_AXES), (1,) * len(MESH_AXES))
        cost = machine.collective_cost(grid, machine.links(grid), axis)
        link = 0.9 * machine.chip.ici_bandwidth / 6
        assert cost == pytest.approx(each / (links * link)), (sizes, axis)


def test_devices_of_a_chip_on_one_stage_share_the_link_to_the_next():
    for sizes, each in (({"stage": 2, "tensor": 8}, 1), ({"data": 2, "stage": 4, "fsdp": 2}, 2)):
        machine = machine_of("tpu7x:2x2x2", 1, Config())
        grid = Grid(tuple(sizes.get(a, 1) for a in MESH_AXES), (1,) * len(MESH_AXES))
        link = 0.9 * machine.chip.ici_bandwidth / 6
        assert machine.permute_cost(grid, machine.links(grid)) == pytest.approx(each / link)


def test_devices_of_a_chip_share_its_part_of_the_network_between_slices():
    for topology, each in (("v5p:2x2x1", 1), ("tpu7x:2x2x1", 2)):
        machine = machine_of(topology, 2, Config())
        alone = (1,) * len(MESH_AXES)
        slices = tuple(2 if axis == "stage" else 1 for axis in MESH_AXES)
        grid = Grid(alone, slices)
        assert machine.permute_cost(grid, {}) == pytest.approx(each / machine.chip.dcn_bandwidth)
