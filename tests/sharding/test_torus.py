"""Gathers along a whole torus take two steps, and what they move is the same."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.sharding.torus import all_gather, line_length, scatter_sum

AXES = ("data", "stage", "fsdp")


def torus(sizes, shape, kind="TPU v5p", *, slices=1, order=(0, 1, 2)):
    """Return what is read of a mesh of (data, stage, fsdp) over slices of a torus."""
    places = np.moveaxis(np.indices(sizes), 0, -1).transpose(*order, 3).reshape(-1, len(sizes))
    devices: np.ndarray = np.empty(slices * len(places), object)
    devices[:] = [
        SimpleNamespace(device_kind=kind, coords=tuple(map(int, place)), slice_index=number)
        for number in range(slices)
        for place in places
    ]
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=AXES)


@pytest.mark.parametrize(
    ("mesh", "line"),
    [
        (torus((4, 4, 4), (1, 1, 64)), 4),
        (torus((4, 4, 8), (1, 1, 128)), 8),
        (torus((4, 4, 8), (1, 1, 128), order=(2, 0, 1)), 4),
        (torus((4, 4, 4), (2, 2, 64), slices=4), 4),
        (torus((4, 4, 4), (1, 1, 64), "TPU v4"), 4),
    ],
    ids=["cube", "long", "lines_of_another_dimension", "each_slice", "v4"],
)
def test_line_length_is_that_of_consecutive_devices_of_a_whole_torus(mesh, line):
    assert line_length(mesh) == line


@pytest.mark.parametrize(
    "mesh",
    [
        torus((4, 4, 4), (1, 2, 32)),
        torus((4, 4, 8), (1, 2, 64), order=(2, 0, 1)),
        torus((2, 4, 4), (1, 1, 32)),
        torus((4, 4, 4), (1, 1, 128), slices=2),
        torus((16, 16, 1), (1, 1, 256), "TPU v6 lite"),
        torus((4, 4, 4), (1, 1, 64), "TPU v99"),
    ],
    ids=["part", "half", "open", "between_slices", "two_dimensions", "unknown"],
)
def test_line_length_is_one_elsewhere(mesh):
    assert line_length(mesh) == 1


def test_line_length_is_one_where_a_chip_is_two_devices():
    mesh = torus((4, 4, 4), (1, 1, 64), "TPU7x")
    mesh.devices = np.repeat(mesh.devices, 2, axis=2)
    assert line_length(mesh) == 1


def test_line_length_of_simulated_devices_is_one():
    assert line_length(make_mesh(tiny(**{"mesh.ici.fsdp": 8}))) == 1


@pytest.mark.parametrize("line", [1, 2, 4])
def test_gather_and_scatter_in_two_steps_move_the_same(line):
    mesh = make_mesh(tiny(**{"mesh.ici.fsdp": 8}))
    weight = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)

    def both(shard, scale):
        full = all_gather(shard, "fsdp", 1, line)
        return full, scatter_sum(full * scale[0], "fsdp", 1, line)

    f = jax.jit(
        jax.shard_map(
            both,
            mesh=mesh,
            in_specs=(P(None, "fsdp"), P("fsdp")),
            out_specs=(P(), P(None, "fsdp")),
            check_vma=False,
        )
    )
    scales = np.arange(1, 9, dtype=np.float32)
    full, total = f(weight, scales)
    np.testing.assert_array_equal(full, weight)
    np.testing.assert_allclose(total, 36 * weight, rtol=1e-6)
    steps = 1 if line == 1 else 2
    assert str(jax.make_jaxpr(f)(weight, scales)).count("all_gather[") == steps
