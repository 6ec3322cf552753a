"""Gather along a whole torus in two steps: along its lines, then across them.

Libtpu (0.0.42 to 0.0.50) turns one gather among all chips of a v4 or v5p slice whose three
dimensions are closed into a sum of zero-padded arrays, which have to be filled first and send every
byte twice; a scatter becomes a sum of whole arrays. It keeps gathers along one or two dimensions.
If some of several axes cross slices, these go first: between slices a host's network is an order of
magnitude slower than the links within one.

Letters: n devices of the axis, k of them on a line.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from maxpipe.devices.chips import chip_for, coordinates, slice_of

TORUS_AXIS = "fsdp"
_DIMENSIONS = 3


class Route(NamedTuple):
    """What gathers and scatters need to know about the machine.

    Attributes:
      line: k of mesh axis fsdp; 1 if gathers along it take one step.
      crossing: mesh axes along which neighbours lie in different slices.
    """

    line: int = 1
    crossing: tuple[str, ...] = ()


ONE_SLICE = Route()


def line_length(mesh: Mesh) -> int:
    """Return k if mesh axis fsdp spans whole closed tori of three dimensions, else 1.

    Each k consecutive devices of the axis are one line, in the order of the mesh. If a chip is two
    devices, k is 1: libtpu keeps gathers among a part of them as they are; the rest is untested.

    Args:
      mesh: a device mesh of whole slices.
    """
    devices = list(mesh.devices.flat)
    chip = chip_for(devices[0].device_kind)
    if chip is None or chip.torus is None or chip.torus.dimensions != _DIMENSIONS:
        return 1
    slices = np.array([slice_of(device) for device in devices])
    places = np.array([coordinates(device) for device in devices])  # [devices, dimensions]
    of_slice = places[slices == slices[0]]
    sizes = np.ptp(of_slice, axis=0) + 1
    if len(of_slice) != np.prod(sizes) or not all(chip.torus.rings(sizes.tolist())):
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
    if len(places) != np.prod(sizes):
        return 1
    for size in sorted(sizes.tolist(), reverse=True):
        # [n, dimensions] -> [n / k, k, dimensions]; within a line one coordinate differs.
        lines = places.reshape(-1, size, _DIMENSIONS)
        if np.all(np.sum(np.ptp(lines, axis=1) > 0, axis=1) == 1):
            return size
    return 1


def gather_dimension(x: jax.Array, axes: Sequence[str], dim: int, route: Route) -> jax.Array:
    """Gather [..., m, ...] of each device to [..., n m, ...]; n devices over all of the axes.

    Args:
      x: this device's part.
      axes: manual mesh axes that split the dimension, the outermost first.
      dim: dimension that is gathered.
      route: the route of the mesh.
    """
    *outer, last = axes
    if not {*outer} & {*route.crossing}:
        for axis in reversed(axes):
            x = _gather(x, axis, dim, route.line)
        return x
    # Axes across slices go first: over these, only shards are sent, not whole arrays.
    parts = jnp.expand_dims(x, dim)  # [..., 1, m, ...]
    for axis in reversed(outer):
        parts = _gather(parts, axis, dim, route.line)
    parts = _gather(parts, last, dim + 1, route.line)  # [..., outer, m * devices, ...]
    return parts.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def scatter_dimension(x: jax.Array, axes: Sequence[str], dim: int, route: Route) -> jax.Array:
    """Return this device's part [..., m, ...] of the sum of all devices' [..., n m, ...].

    Arguments as for `gather_dimension`.
    """
    *outer, last = axes
    if not {*outer} & {*route.crossing}:
        for axis in axes:
            x = _scatter(x, axis, dim, route.line)
        return x
    across = math.prod(lax.axis_size(axis) for axis in outer)
    # [..., n m, ...] -> [..., outer, m * devices, ...]
    parts = x.reshape(*x.shape[:dim], across, -1, *x.shape[dim + 1 :])
    parts = _scatter(parts, last, dim + 1, route.line)
    for axis in outer:
        parts = _scatter(parts, axis, dim, route.line)
    return jnp.squeeze(parts, dim)


def _gather(x: jax.Array, axis: str, dim: int, line: int) -> jax.Array:
    """Gather along one axis, [..., m, ...] -> [..., n m, ...]."""
    if line == 1 or axis != TORUS_AXIS:
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    for groups in _groups(lax.axis_size(axis), line):
        x = lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    return x


def _scatter(x: jax.Array, axis: str, dim: int, line: int) -> jax.Array:
    """Sum along one axis, [..., n m, ...] -> [..., m, ...]."""
    if line == 1 or axis != TORUS_AXIS:
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    for groups in reversed(_groups(lax.axis_size(axis), line)):
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return x


def _groups(size: int, line: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of devices on one line, and of those at the same place on their lines."""
    places = np.arange(size).reshape(-1, line)
    return places.tolist(), places.T.tolist()
