"""Links of mesh axes by the shape of a slice are those of the devices that JAX lays there."""

import itertools
import math

import pytest
from helpers.compile_command import tpu_aot

from maxpipe.compile import topology
from maxpipe.config import Config, replace
from maxpipe.devices.chips import chip_of
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
