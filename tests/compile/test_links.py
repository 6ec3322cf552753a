"""Links of the torus that mesh axes span: made-up coordinates, and TPU topologies."""

from itertools import product
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.compile_command import QUICK, report_of, tpu_aot

from maxpipe.compile.collectives import Collective, link_uses, network_seconds
from maxpipe.devices.chips import GB, chip_of
from maxpipe.plan.links import group_links, links_along


def torus(sizes, shape, names, slices=1):
    """A mesh whose devices lie in the torus in the order of their coordinates."""
    devices = [
        SimpleNamespace(coords=coords, slice_index=index, platform="tpu")
        for index in range(slices)
        for coords in product(*(range(size) for size in sizes))
    ]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return SimpleNamespace(devices=grid.reshape(shape), axis_names=names)


def test_links_along_axes_are_those_of_the_dimensions_an_axis_spans():
    expected = {
        # Closed dimensions of whole cubes: two links each.
        ("v5p", (4, 4, 4), (4, 16)): (2, 4),
        ("v4", (4, 4, 8), (16, 8)): (4, 2),
        ("v5p", (4, 4, 4), (1, 64)): (1, 6),  # an axis of one device spans nothing
        # Open lines: the ends have one link in each dimension.
        ("v5p", (2, 2, 2), (2, 4)): (1, 2),
        ("v5p", (2, 2, 4), (4, 4)): (2, 1),
        ("v5e", (4, 4, 1), (4, 4)): (1, 1),
        ("v6e", (4, 8, 1), (1, 32)): (1, 2),
        # A dimension of a pod's whole length is closed.
        ("v5e", (16, 16, 1), (16, 16)): (2, 2),
        ("v6e", (8, 16, 1), (8, 16)): (1, 2),
        # A part of a closed dimension is an open line.
        ("v5e", (16, 16, 1), (64, 4)): (3, 1),
    }
    for (chip, sizes, shape), links in expected.items():
        mesh = torus(sizes, shape, ("data", "fsdp"))
        found = tuple(links_along(mesh, chip_of(chip), axis) for axis in ("data", "fsdp"))
        assert found == links, (chip, sizes, shape)
    # Several axes have all their dimensions, and those of slices only what is within one.
    mesh = torus((4, 4, 4), (4, 4, 4), ("data", "stage", "fsdp"))
    assert links_along(mesh, chip_of("v5p"), "data,fsdp") == 4
    assert links_along(mesh, chip_of("v5p"), "data,stage,fsdp") == 6
    mesh = torus((4, 4, 1), (8, 4), ("data", "fsdp"), slices=2)
    assert links_along(mesh, chip_of("v5e"), "data") == 1


def test_group_links_are_those_of_a_part_of_a_mesh_axis():
    mesh = torus((4, 4, 4), (2, 64), ("data", "fsdp"), slices=2)
    lines = [range(n, n + 4) for n in range(0, 64, 4)]
    planes = [range(n, 64, 4) for n in range(4)]
    found = [group_links(mesh, chip_of("v5p"), groups) for groups in (lines, planes, [range(64)])]
    assert found == [2, 4, 6]


def test_devices_of_a_chip_in_groups_of_their_own_share_its_links():
    devices = np.repeat(torus((2, 2, 2), (8,), ("fsdp",)).devices, 2)
    mesh = SimpleNamespace(devices=devices, axis_names=("fsdp",))
    for groups, links in (
        ([range(0, 16, 2), range(1, 16, 2)], 1.5),  # the devices of a chip are in two groups
        ([range(16)], 3),
        ([range(8), range(8, 16)], 2),
        ([range(n, n + 2) for n in range(0, 16, 2)], 1),  # the bound stays finite
    ):
        assert group_links(mesh, chip_of("tpu7x"), groups) == links, groups


def test_links_along_axes_between_neighbours_are_one_in_each_direction():
    for length, links in ((2, 1), (4, 2), (16, 2)):
        mesh = torus((length, 2, 1), (length, 2), ("stage", "fsdp"))
        assert links_along(mesh, chip_of("v5e"), "stage", between_neighbours=True) == links


def test_network_seconds_are_those_of_the_slowest_axes():
    chip, mesh = chip_of("v5p"), torus((2, 2, 2), (2, 4), ("stage", "fsdp"))
    collectives = [
        Collective("all-gather", "fsdp", "ici", 1, 1, 100 * GB),
        Collective("reduce-scatter", "fsdp", "ici", 1, 1, 100 * GB),
        Collective("collective-permute", "stage", "ici", 1, 1, 50 * GB),
        Collective("all-reduce", "", "ici", 1, 0, 0),
    ]
    uses = link_uses(collectives, mesh, chip)
    found = [(use.axes, use.kind, use.links, use.of) for use in uses]
    assert found == [("fsdp", "collectives", 2, 6), ("stage", "permutes", 1, 6)]
    assert [use.seconds for use in uses] == pytest.approx([1.0, 0.5])
    assert network_seconds(uses, chip) == pytest.approx(1.0)
    # At least those of all links together.
    axes = ("data", "stage", "fsdp")
    mesh = torus((4, 4, 4), (4, 4, 4), axes)
    each = [Collective("all-gather", axis, "ici", 1, 1, 200 * GB) for axis in axes]
    whole = Collective("all-gather", "data,stage,fsdp", "ici", 1, 1, 300 * GB)
    uses = link_uses([*each, whole], mesh, chip)
    assert network_seconds(uses, chip) == pytest.approx(1.5)
    # Over DCN those of the network card.
    mesh = torus((2, 2, 1), (2, 4), ("data", "fsdp"), slices=2)
    between = [Collective("all-reduce", "data", "dcn", 1, 1, 25 * GB)]
    v5p, v4 = chip_of("v5p"), chip_of("v4")
    uses = link_uses(between, mesh, v5p)
    assert (uses[0].links, network_seconds(uses, v5p)) == (None, pytest.approx(4.0))
    assert network_seconds(link_uses(between, mesh, v4), v4) is None


class TestTpu:
    pytestmark = tpu_aot

    def test_report_names_the_links_of_each_mesh_axis(self, tmp_path):
        words = ("compile.topology=v5p:2x2x2", "mesh.ici.fsdp=4", "data.global_batch_size=32")
        report, text = report_of(tmp_path, "configs/base.yml", *words, environment=QUICK)
        links = {(use["axes"], use["kind"]): (use["links"], use["of"]) for use in report["links"]}
        # Stages differ in one dimension of the torus, fsdp in the two others; none is closed. jax
        # 0.12 turns the order of the second stage, whose devices then differ in two.
        stage_links = 1 if jax.__version__.startswith("0.10.") else 2
        assert links["stage", "permutes"] == (stage_links, 6)
        assert links["fsdp", "collectives"] == (2, 6)
        slowest = max(use["seconds"] for use in report["links"])
        assert report["bounds"]["network_seconds"] == pytest.approx(slowest)
        assert "2 of 6 links" in text
