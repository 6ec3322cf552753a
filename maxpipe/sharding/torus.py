"""Gather along a whole torus in two steps: along its lines, then across them.

Libtpu (0.0.42 to 0.0.50) makes one gather among all devices of a slice whose three dimensions are
closed a sum of arrays padded with zeros, which fills them first and sends every byte twice; a
scatter becomes a sum of whole arrays. Along one or two dimensions it makes them as they are.

Letters: n devices of the axis, k of them on a line.
"""

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from maxpipe.devices.chips import chip_for, coordinates, slice_of

TORUS_AXIS = "fsdp"
_DIMENSIONS = 3


def line_length(mesh: Mesh) -> int:
    """Return k if mesh axis fsdp spans whole closed tori of three dimensions, else 1.

    Each k consecutive devices of the axis are one line, in the order of the mesh.

    Args:
      mesh: of whole slices.
    """
    devices = list(mesh.devices.flat)
    chip = chip_for(devices[0].device_kind)
    if chip is None or chip.torus is None or chip.torus.dimensions != _DIMENSIONS:
        return 1
    slices = np.array([slice_of(device) for device in devices])
    places = np.array([coordinates(device) for device in devices])  # [devices, dimensions]
    sizes = np.ptp(places[slices == slices[0]], axis=0) + 1
    if not all(chip.torus.rings(sizes.tolist())):
        return 1
    index = np.arange(len(devices)).reshape(mesh.devices.shape)
    at = mesh.axis_names.index(TORUS_AXIS)
    groups = np.moveaxis(index, at, -1).reshape(-1, mesh.devices.shape[at])
    lengths = {
        _line_length(places[group], sizes) if len(np.unique(slices[group])) == 1 else 1
        for group in groups
    }
    return lengths.pop() if len(lengths) == 1 else 1


def _line_length(places: np.ndarray, sizes: np.ndarray) -> int:
    """Return k of one group, [n, dimensions], in a torus of these sizes."""
    if not len(np.unique(places, axis=0)) == len(places) == np.prod(sizes):
        return 1
    for size in sorted(sizes.tolist(), reverse=True):
        # [n, dimensions] -> [n / k, k, dimensions]; within a line one coordinate differs.
        lines = places.reshape(-1, size, _DIMENSIONS)
        if np.all(np.sum(np.ptp(lines, axis=1) > 0, axis=1) == 1):
            return size
    return 1


def all_gather(x: jax.Array, axis: str, dim: int, line: int) -> jax.Array:
    """Return [..., m, ...] of each device of a manual axis as [..., n m, ...].

    Args:
      x: this device's part.
      axis: of the mesh.
      dim: dimension that is gathered.
      line: k of the axis; 1 gathers in one step.
    """
    if line == 1:
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    for groups in _groups(lax.axis_size(axis), line):
        x = lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def scatter_sum(x: jax.Array, axis: str, dim: int, line: int) -> jax.Array:
    """Return this device's part [..., m, ...] of the sum of all devices' [..., n m, ...].

    Arguments as for `all_gather`.
    """
    if line == 1:
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    for groups in reversed(_groups(lax.axis_size(axis), line)):
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def _groups(size: int, line: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of devices on a line, and of those at the same place of their lines."""
    places = np.arange(size).reshape(-1, line)
    return places.tolist(), places.T.tolist()
