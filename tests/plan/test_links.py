"""Links of mesh axes by the shape of a slice, and what a byte costs along them."""

import itertools
import math

import pytest
from helpers.compile_command import tpu_aot

from maxpipe.compile import topology
from maxpipe.config import Config, replace
from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import LINK_EFFICIENCY, chip_of
from maxpipe.devices.mesh import build_mesh
from maxpipe.plan.links import axis_links, link_costs, links_along
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.space import Grid
from maxpipe.sharding.torus import line_length


def test_links_of_an_axis_are_those_of_its_dimensions():
    for sizes, grid, name, expected in (
        # A whole dimension that is a ring has two links, an open line one.
        ({"stage": 8, "fsdp": 16}, (4, 4, 8), "v5p:4x4x8", {"stage": 2, "fsdp": 4}),
        ({"data": 4, "fsdp": 4}, (4, 4), "v5e:4x4", {"data": 1, "fsdp": 1}),
        ({"stage": 2, "fsdp": 8}, (4, 4), "v5e:4x4", {"fsdp": 2}),
    ):
        links = axis_links(sizes, grid, chip_of(name))
        assert {axis: links[axis].collectives for axis in expected} == expected, (sizes, grid)


def axes(**sizes):
    return tuple(sizes.get(axis, 1) for axis in MESH_AXES)


def costs_on(name, **sizes):
    machine = machine_of(name, 1, Config())
    link = LINK_EFFICIENCY * machine.chip.link_bandwidth
    return link_costs(machine, Grid(axes(**sizes), axes())), link


def test_gathers_along_a_whole_torus_take_two_steps_and_scatters_over_a_whole_slice_are_sums():
    for name, size, gather, scatter in (
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
        costs, link = costs_on(name, fsdp=size)
        others = (size - 1) / size  # parts that a device does not have
        assert others * costs.gather * link == pytest.approx(gather), name
        assert others * costs.scatter(by_partitioner=1.0) * link == pytest.approx(scatter), name


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


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize("name", ["v5e:2x2", "v5e:2x4", "v6e:2x4"])
    def test_links_on_a_small_slice_are_those_of_every_mesh(self, name):
        """JAX lays these devices in an order of its own, where an axis may run diagonally."""
        grid = tuple(int(size) for size in name.partition(":")[2].split("x"))
        chip, axes = chip_of(name), ("stage", "fsdp", "tensor")
        config = replace(Config(), **{"compile.topology": name, "mesh.ici.fsdp": 1})
        devices = topology.devices_of(config)
        for sizes in itertools.product((1, 2, 4, 8), repeat=len(axes)):
            if math.prod(sizes) != len(devices):
                continue
            keys = {f"mesh.ici.{axis}": size for axis, size in zip(axes, sizes, strict=True)}
            mesh = build_mesh(replace(config, **keys), devices)
            links = axis_links(mesh.shape, grid, chip)
            for axis, size in mesh.shape.items():
                expected = links_along(mesh, chip, axis) if size > 1 else 1
                assert links[axis].collectives == expected, (sizes, axis)

    @pytest.mark.parametrize(
        "name", ["v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x4", "v4:4x4x4", "tpu7x:4x4x4"]
    )
    def test_whole_tori_are_those_along_which_engines_gather_in_two_steps(self, name):
        machine = machine_of(name, 1, Config())
        config = replace(Config(), **{"compile.topology": name})
        devices = topology.devices_of(config)
        for other in (1, 2, 4):
            grid = Grid((other, 1, len(devices) // other, 1, 1, 1), (1,) * 6)
            keys = {
                "mesh.ici.data": other,
                "mesh.ici.fsdp": len(devices) // other,
                "mesh.ici.stage": 1,
            }
            line = line_length(build_mesh(replace(config, **keys), devices))
            is_whole = link_costs(machine, grid).is_whole_torus
            assert line == (machine.grid[-1] if is_whole else 1)
            assert is_whole == (other == 1 and name not in ("v5p:2x4x4", "tpu7x:4x4x4"))
