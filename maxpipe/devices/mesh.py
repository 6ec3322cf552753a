"""Build the device mesh with its axes data, stage, fsdp, context, tensor and expert."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.devices.chips import slice_of


def num_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of slices (ICI domains) that the devices form."""
    return len({slice_of(device) for device in devices})


def build_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh of a resolved configuration.

    Args:
      config: resolved, so that the product of `mesh.ici` and `mesh.dcn` is the number of devices.
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
        # CPU devices have no topology; they are numbered as they are.
        grid = np.asarray(devices).reshape([d * i for d, i in zip(dcn, ici, strict=True)])
    else:
        # JAX arranges the axes along the links of the slice.
        grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES)


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
