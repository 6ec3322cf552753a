"""Gathers along a whole torus take two steps, and what they move is the same."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.sharding.torus import Route, gather_dimension, line_length, scatter_dimension

AXES = ("data", "stage", "fsdp")


def torus(sizes, shape, kind="TPU v5p", *, slices=1, order=(0, 1, 2)):
    places = np.moveaxis(np.indices(sizes), 0, -1).transpose(*order, 3).reshape(-1, len(sizes))
    devices: np.ndarray = np.empty(slices * len(places), object)
    devices[:] = [
        SimpleNamespace(device_kind=kind, coords=tuple(map(int, place)), slice_index=number)
        for number in range(slices)
        for place in places
    ]
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=AXES)


def test_line_length_is_that_of_consecutive_devices_of_a_whole_torus():
    for mesh, line in (
        (torus((4, 4, 4), (1, 1, 64)), 4),
        (torus((4, 4, 8), (1, 1, 128)), 8),
        (torus((4, 4, 8), (1, 1, 128), order=(2, 0, 1)), 4),  # lines of another dimension
        (torus((4, 4, 4), (2, 2, 64), slices=4), 4),  # each slice
        (torus((4, 4, 4), (1, 1, 64), "TPU v4"), 4),
    ):
        assert line_length(mesh) == line


def test_line_length_is_one_elsewhere():
    for mesh in (
        torus((4, 4, 4), (1, 2, 32)),  # a part
        torus((4, 4, 8), (1, 2, 64), order=(2, 0, 1)),  # half
        torus((2, 4, 4), (1, 1, 32)),  # open
        torus((4, 4, 4), (1, 1, 128), slices=2),  # between slices
        torus((16, 16, 1), (1, 1, 256), "TPU v6 lite"),  # two dimensions
        torus((4, 4, 4), (1, 1, 64), "TPU v99"),  # unknown
    ):
        assert line_length(mesh) == 1
    for axis in (2, 1):
        mesh = torus((4, 4, 4), (1, 1, 64), "TPU7x")
        # The devices of a chip follow each other, or are those of an axis before fsdp.
        mesh.devices = np.repeat(mesh.devices, 2, axis=axis)
        assert line_length(mesh) == 1
    assert line_length(make_mesh(tiny(**{"mesh.ici.fsdp": 8}))) == 1


@pytest.mark.parametrize("axes", [("fsdp",), ("stage", "fsdp"), ("fsdp", "stage")])
@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("crossing", [(), ("stage",)])
def test_gather_and_scatter_of_every_route_move_the_same(axes, line, crossing):
    route = Route(line, crossing)
    mesh = make_mesh(tiny(**{"mesh.ici.stage": 2, "mesh.ici.fsdp": 4}))
    weight = np.arange(3 * 16, dtype=np.float32).reshape(3, 16)
    scales = np.arange(1, 9, dtype=np.float32).reshape(2, 4)

    def both(shard, scale):
        full = gather_dimension(shard, axes, 1, route)
        return full, scatter_dimension(full * scale[0, 0], axes, 1, route)

    specs = {"in_specs": (P(None, axes), P("stage", "fsdp")), "out_specs": (P(), P(None, axes))}
    f = jax.jit(jax.shard_map(both, mesh=mesh, check_vma=False, **specs))
    full, total = f(weight, scales)
    np.testing.assert_array_equal(full, weight)
    summed = scales.sum() if "stage" in axes else scales[0].sum()
    np.testing.assert_allclose(total, summed * weight, rtol=1e-6)
    steps = line + len(axes) - 1
    assert str(jax.make_jaxpr(f)(weight, scales)).count("all_gather[") == steps


@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize(("crossing", "size"), [((), 4), (("stage",), 1)])
def test_axes_that_cross_slices_carry_shards(line, crossing, size):
    """Elsewhere fsdp comes first, and the axis before it carries what that has gathered."""
    mesh = make_mesh(tiny(**{"mesh.ici.stage": 2, "mesh.ici.fsdp": 4}))
    axes, route = ("stage", "fsdp"), Route(line, crossing)

    def both(shard):
        return scatter_dimension(gather_dimension(shard, axes, 0, route), axes, 0, route)

    f = jax.shard_map(both, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    program = jax.make_jaxpr(f)(np.zeros(8, np.float32))
    (body,) = [eqn.params["jaxpr"] for eqn in program.eqns]
    sizes = {
        eqn.primitive.name: math.prod(eqn.invars[0].aval.shape)
        for eqn in body.eqns
        if "stage" in str(eqn.params.get("axis_name"))
    }
    assert sizes == {"all_gather": size, "reduce_scatter": 2 * size}
