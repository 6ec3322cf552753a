"""Build the device mesh with its axes data, stage, fsdp, context, tensor and expert."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.devices.chips import slice_of


def num_slices(devices: Sequence[jax.Device]) -> int:
    return len({slice_of(device) for device in devices})


def crossing_axes(mesh: Mesh) -> tuple[str, ...]:
    slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
    return tuple(
        name for i, name in enumerate(mesh.axis_names) if (np.diff(slices, axis=i) != 0).any()
    )


def build_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh of a resolved configuration.

    Args:
      config: resolved configuration; `mesh.ici` times `mesh.dcn` is the number of devices.
      devices: the devices to use; all by default.

    Returns:
      A mesh with the axes `MESH_AXES`, each partitioned automatically. In each axis the DCN part
      varies slowest.
    """
    devices = jax.devices() if devices is None else devices
    ici = [getattr(config.mesh.ici, axis) for axis in MESH_AXES]
    dcn = [getattr(config.mesh.dcn, axis) for axis in MESH_AXES]
    if num_slices(devices) > 1:
        # Neighbours in the ICI part of an axis must be in one slice.
        grid = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices, allow_split_physical_axes=True
        )
    elif devices[0].platform == "cpu":
        # CPU devices have no topology; they stay in their order.
        grid = np.asarray(devices).reshape([d * i for d, i in zip(dcn, ici, strict=True)])
    else:
        # JAX arranges the axes along the links of the slice.
        grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    engine = ENGINES.get(config.pipeline.engine)
    if engine and not engine.one_program:
        grid = whole_processes(grid)
    return Mesh(grid, MESH_AXES)


def stage_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """Return the mesh of each stage: all axes, `stage` with size 1."""
    # The axis stays, with size 1, so that specs of the whole mesh are legal on a stage.
    axis = mesh.axis_names.index("stage")
    return tuple(
        Mesh(np.take(mesh.devices, [stage], axis), mesh.axis_names)
        for stage in range(mesh.shape["stage"])
    )


def whole_processes(grid: np.ndarray) -> np.ndarray:
    """Return the devices arranged so that no process has parts of several stages, if possible.

    A grid (devices by mesh axis) that is already arranged so is returned unchanged.
    """
    axis = MESH_AXES.index("stage")
    stages = np.moveaxis(grid, axis, 0)
    if has_whole_processes(grid):
        return grid
    # Neighbours stay neighbours within a process, whose devices are numbered along its links.
    ordered = sorted(grid.flat, key=lambda d: (slice_of(d), d.process_index, d.id))
    regrouped: np.ndarray = np.empty(grid.size, object)
    regrouped[:] = ordered
    by_stage = np.moveaxis(regrouped.reshape(stages.shape), 0, axis)
    return by_stage if has_whole_processes(by_stage) else grid


def has_whole_processes(grid: np.ndarray) -> bool:
    """Return whether every stage of a grid consists of whole processes, or lies in one."""
    stages = np.moveaxis(grid, MESH_AXES.index("stage"), 0)
    members = [frozenset(d.process_index for d in stage.flat) for stage in stages]
    return all(
        a.isdisjoint(b) or (a == b and len(a) == 1) for a, b in itertools.combinations(members, 2)
    )


def rows_of_this_process(mesh: Mesh, spec: PartitionSpec, num_rows: int) -> list[int]:
    """Return the indices of the batch rows that this process's devices hold, in order.

    Args:
      mesh: the device mesh.
      spec: PartitionSpec of a [rows, ...] array.
      num_rows: rows of the global batch.
    """
    # How other dimensions are split makes no difference to the rows.
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*spec[:1]))
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)
