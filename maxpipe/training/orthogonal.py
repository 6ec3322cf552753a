"""Orthogonalise matrices; of several devices each takes some whole ones.

A parameter is a stack of matrices, of layers and perhaps of experts. At rest a device has a part of
each, and devices along `data` and `context` have the same parts, which products of matrices would
exchange again and again. Instead matrices of one shape are dealt out, and the results go back to
where the parameters lie (Liu et al. 2025, "Muon is Scalable for LLM Training").

Letters: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from maxpipe.devices.mesh import crossing_axes
from maxpipe.sharding.rules import MeshAxes, axes_by_dimension, axes_of

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at singular values of 0 (Jordan 2024)
LEAST_NORM = 1e-8


class Matrices(NamedTuple):
    """A parameter as matrices.

    Attributes:
      shape: rows and columns.
      dimensions: that of the rows, then those of the columns, counted from the last, -1.
      sharding: of the live parameter, which has leading layer dimensions; None on one device.
    """

    shape: tuple[int, int]
    dimensions: tuple[int, ...]
    sharding: NamedSharding | None


class Layout(NamedTuple):
    """Rows and columns of whole matrices, and the mesh axes that split them.

    Along `copies` all devices have the same. Axes across slices are left out: between slices
    results would take longer to send than to compute.
    """

    shape: tuple[int, int]
    rows: MeshAxes = ()
    columns: MeshAxes = ()
    copies: MeshAxes = ()


def orthogonalised(arrays: list[jax.Array], matrices: list[Matrices]) -> list[jax.Array]:
    """Orthogonalise all matrices of parameters, which are laid out as these are."""
    shardings = [m.sharding for m in matrices if m.sharding is not None]
    if not shardings or shardings[0].mesh.size == 1:
        layouts = [Layout(m.shape) for m in matrices]
        return _orthogonalised(matrices, layouts, {}, *arrays)
    mesh, specs = shardings[0].mesh, tuple(sharding.spec for sharding in shardings)
    layouts = [_layout(m, x.ndim) for m, x in zip(matrices, arrays, strict=True)]
    on_parts = partial(_orthogonalised, matrices, layouts, dict(mesh.shape))
    return jax.shard_map(on_parts, mesh=mesh, in_specs=specs, out_specs=[*specs], check_vma=False)(
        *arrays
    )


def _layout(matrices: Matrices, ndim: int) -> Layout:
    sharding = matrices.sharding
    assert sharding is not None
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    entries = axes_by_dimension(sharding.spec)
    entries += [()] * (ndim - len(entries))
    rows, *columns = (entries[i] for i in matrices.dimensions)
    taken = {*axes_of(sharding.spec), *crossing_axes(mesh)}
    copies = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in taken)
    return Layout(matrices.shape, rows, sum(columns, ()), copies)


def _orthogonalised(
    matrices: list[Matrices], layouts: list[Layout], sizes: dict[str, int], *parts: jax.Array
) -> list[jax.Array]:
    """Orthogonalise matrices of which this device has parts, or the whole."""
    groups: dict[Layout, list[int]] = defaultdict(list)
    for i, layout in enumerate(layouts):
        groups[layout].append(i)
    results = list(parts)
    for layout, members in groups.items():
        turned, stacks = {}, []
        for i in members:
            dimensions = matrices[i].dimensions
            first = -len(dimensions)
            x = jnp.moveaxis(parts[i], dimensions, range(first, 0))
            turned[i] = x.shape
            # [..., R / r, columns] -> [N, R / r, C / c]
            stacks.append(x.reshape(-1, x.shape[first], math.prod(x.shape[first + 1 :])))
        ends = np.cumsum([len(stack) for stack in stacks])[:-1]
        done = jnp.split(_dealt_out(jnp.concatenate(stacks), layout, sizes), ends)
        for i, stack in zip(members, done, strict=True):
            dimensions = matrices[i].dimensions
            x = stack.reshape(turned[i])
            results[i] = jnp.moveaxis(x, range(-len(dimensions), 0), dimensions)
    return results


def _dealt_out(stack: jax.Array, layout: Layout, sizes: dict[str, int]) -> jax.Array:
    """Orthogonalise a stack, of which this device has the parts [N, R / r, C / c]."""
    num, rows, columns = stack.shape
    devices = math.prod(sizes[axis] for axis in layout.rows + layout.columns)
    taken: MeshAxes = ()
    for axis in layout.copies:
        if num > devices:  # else these devices would have nothing to do
            taken, devices = (*taken, axis), devices * sizes[axis]
    own = jnp.pad(stack, ((0, -num % devices), (0, 0), (0, 0)))
    if taken:
        copies = math.prod(sizes[axis] for axis in taken)
        own = own.reshape(copies, -1, rows, columns)[lax.axis_index(taken)]
    # [N, R / r, C / c] -> [N / r, R, C / c] -> [N / (r c), R, C]
    own = _exchanged(own, layout.rows, 0, 1)
    own = _exchanged(own, layout.columns, 0, 2)
    # One at a time: the products of one matrix occupy a chip, those of all would fill its memory.
    own = lax.map(newton_schulz, own)
    own = _exchanged(own, layout.columns, 2, 0)
    own = _exchanged(own, layout.rows, 1, 0)
    if taken:
        own = lax.all_gather(own, taken, tiled=True)
    return own[:num]


def _exchanged(x: jax.Array, axes: MeshAxes, split: int, joined: int) -> jax.Array:
    return lax.all_to_all(x, axes, split, joined, tiled=True) if axes else x


def newton_schulz(x: jax.Array) -> jax.Array:
    """Return a matrix [R, C] with the singular vectors of `x` and singular values of about 1.

    They lie between 0.7 and 1.2 (Jordan 2024, "Muon").
    """
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    linear, cubic, quintic = COEFFICIENTS
    x = x / (jnp.linalg.norm(x) + LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        square = x @ x.T
        x = linear * x + (cubic * square + quintic * square @ square) @ x
    return x
