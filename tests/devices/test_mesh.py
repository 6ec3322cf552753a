"""The mesh's axes and devices, and the rows of a batch that a process holds."""

from dataclasses import dataclass

import jax
import numpy as np
from helpers.engines import make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.config import MESH_AXES, Config, replace
from maxpipe.devices.mesh import (
    build_mesh,
    crossing_axes,
    has_whole_processes,
    num_slices,
    rows_of_this_process,
)

EIGHT = {"mesh.ici.data": 2, "mesh.ici.stage": 2, "mesh.ici.fsdp": 2}


def test_build_mesh_has_axes_in_order_with_neighbours_in_the_last_ones():
    mesh = make_mesh(tiny(**EIGHT))
    assert mesh.axis_names == MESH_AXES == ("data", "stage", "fsdp", "context", "tensor", "expert")
    assert dict(mesh.shape) == dict.fromkeys(MESH_AXES, 1) | {"data": 2, "stage": 2, "fsdp": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh needs to know of a device, with two devices in each slice."""

    id: int
    platform: str = "cpu"
    device_kind: str = "fake"
    process_index: int = 0
    client: None = None

    @property
    def slice_index(self):
        return self.id // 2


def test_build_mesh_varies_dcn_slowest():
    """Of two slices with two devices, neighbours in the ICI part of an axis share a slice."""
    config = replace(Config(), **{"mesh.ici.fsdp": 2, "mesh.dcn.data": 2})
    mesh = build_mesh(config, [FakeDevice(i) for i in (3, 0, 2, 1)])
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices).reshape(2, 2)
    assert dict(mesh.shape)["data"] == dict(mesh.shape)["fsdp"] == 2
    np.testing.assert_array_equal(slices, [[0, 0], [1, 1]])
    assert crossing_axes(mesh) == ("data",)
    one_axis = replace(Config(), **{"mesh.ici.fsdp": 2, "mesh.dcn.fsdp": 2})
    slices = [
        device.slice_index for device in build_mesh(one_axis, list(mesh.devices.flat)).devices.flat
    ]
    assert slices == [0, 0, 1, 1]
    assert num_slices([FakeDevice(i) for i in range(6)]) == 3
    assert num_slices(jax.devices()) == 1
    alone = replace(Config(), **{"mesh.ici.fsdp": 2})
    assert crossing_axes(build_mesh(alone, [OneSlice(i) for i in (0, 1)])) == ()


class OneSlice(FakeDevice):
    slice_index = 0


def mesh_of_processes(processes, **sizes):
    engine = {"pipeline.schedule": "1f1b", "pipeline.num_microbatches": 2}
    config = tiny(**engine, **{f"mesh.ici.{axis}": size for axis, size in sizes.items()})
    devices = [OneSlice(i, process_index=p) for i, p in enumerate(processes)]
    return build_mesh(config, devices).devices


def test_build_mesh_of_the_mpmd_engine_gives_stages_whole_processes():
    for processes, sizes, ids in (
        # As they are numbered: in one process, or where stages are whole processes already.
        ([0, 0, 0, 0], {"data": 2, "stage": 2}, [[0, 1], [2, 3]]),
        ([0, 0, 1, 1], {"stage": 2, "fsdp": 2}, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3], {"data": 2, "stage": 2}, [[0, 1], [2, 3]]),
        # Stage 0 gets both devices of process 0.
        ([0, 0, 1, 1], {"data": 2, "stage": 2}, [[0, 2], [1, 3]]),
    ):
        grid = mesh_of_processes(processes, **sizes)
        assert np.vectorize(lambda d: d.id)(grid).reshape(2, 2).tolist() == ids, (processes, sizes)
        assert has_whole_processes(grid), (processes, sizes)


def test_rows_of_one_of_several_processes_are_those_of_its_devices(monkeypatch):
    """A process that owns the devices 2 and 3 of a mesh of 8: stage 1 of the first data row."""
    mesh = make_mesh(tiny(**EIGHT))
    original = jax.sharding.NamedSharding.addressable_devices_indices_map

    def own_part(self, shape):
        return {
            device: index for device, index in original(self, shape).items() if device.id in (2, 3)
        }

    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", own_part)
    assert rows_of_this_process(mesh, P(("data", "fsdp")), 8) == [0, 1, 2, 3]
    assert rows_of_this_process(mesh, P("stage"), 8) == [4, 5, 6, 7]
