"""Find the links of a chip that each mesh axis can use, from the shape of the slice alone.

JAX lays mesh axes along the dimensions of the torus, the last axis first; this follows the same
preference: as many whole dimensions as fit, else parts of them. On small slices of a torus with two
dimensions JAX takes the devices in an order of its own instead (`jax.experimental.mesh_utils`).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxpipe.config.rules.rule import divisors
from maxpipe.devices.chips import Chip

# Chips in the order of the mesh, numbered along the first dimension first.
_SMALL_SLICES: dict[tuple[int, ...], tuple[int, ...]] = {
    (2, 2): (0, 1, 3, 2),
    (2, 4): (0, 1, 2, 3, 7, 6, 5, 4),
}


class AxisLinks(NamedTuple):
    """Links of a chip that a mesh axis uses.

    Attributes:
      collectives, permutes: links used by collectives, and by permutes to a neighbour.
      sharers: number of a chip's devices that are in separate groups, and share these links.
    """

    collectives: int
    permutes: int
    sharers: int = 1


def axis_links(sizes: Mapping[str, int], grid: Sequence[int], chip: Chip) -> dict[str, AxisLinks]:
    """Return the links of each mesh axis within a slice.

    Args:
      sizes: sizes of the mesh axes, in the order of the mesh; their product is the number of chips
        in the grid, or a multiple where a chip is several devices.
      grid: chips in each dimension.
      chip: the slice's chip. Without a torus every axis has every link.
    """
    if chip.torus is None:
        return {axis: AxisLinks(chip.links, chip.links) for axis in sizes}
    rings = chip.torus.rings(grid)
    # The devices of one chip count as a further dimension, which has no links.
    per_chip = max(1, math.prod(sizes.values()) // math.prod(grid))
    places = _small_slice_places(sizes, grid) if chip.torus.dimensions == 2 else None
    if places is None:
        places = {axis: [spans] for axis, spans in _places(sizes, [*grid, per_chip]).items()}
    chips = len(grid)
    # The group with the fewest links decides. A permute goes to the next device, in one dimension.
    return {
        axis: AxisLinks(
            max(1, min(links_of(spans[:chips], grid, rings) for spans in groups)),
            1,
            per_chip // math.prod(groups[0][chips:]),
        )
        for axis, groups in places.items()
    }


def links_of(spans: Sequence[int], grid: Sequence[int], rings: Sequence[bool]) -> int:
    """Return the number of links of a group, from the chips that it spans in each dimension."""
    return sum(
        2 if is_ring and span == size else 1
        for span, size, is_ring in zip(spans, grid, rings, strict=True)
        if span > 1
    )


def _small_slice_places(
    sizes: Mapping[str, int], grid: Sequence[int]
) -> dict[str, list[tuple[int, ...]]] | None:
    """Return the chips that each axis's groups span in each dimension; None if it is not small."""
    order = _SMALL_SLICES.get(tuple(grid))
    if order is None:
        return None
    coordinates = np.array([(place % grid[0], place // grid[0]) for place in order])
    mesh = np.arange(len(order)).reshape([*sizes.values()])
    places = {}
    for number, axis in enumerate(sizes):
        groups = np.moveaxis(mesh, number, -1).reshape(-1, mesh.shape[number])
        places[axis] = [
            tuple(len(np.unique(column)) for column in coordinates[group].T) for group in groups
        ]
    return places


def _places(sizes: Mapping[str, int], grid: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the chips that a group of each axis spans in each dimension."""
    left = list(grid)
    places = {}
    for axis, size in reversed([*sizes.items()]):
        whole = next(_whole_dimensions(size, left), None)
        if whole is None:
            return _split_places(sizes, grid)
        spans = [left[d] if d in whole else 1 for d in range(len(grid))]
        left = [0 if d in whole else count for d, count in enumerate(left)]
        places[axis] = tuple(spans)
    return places


def _whole_dimensions(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if size == 1:
        yield ()
    for count in range(len(left), 0, -1):
        for dimensions in itertools.combinations(range(len(left)), count):
            if math.prod(left[d] for d in dimensions) == size:
                yield dimensions


def _split_places(sizes: Mapping[str, int], grid: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the chips that a group of each axis spans, where a dimension is divided among axes."""
    left = list(grid)
    places = {}
    for axis, size in reversed([*sizes.items()]):
        best = max(
            _factorings(size, left),
            # Whole dimensions first, then many of them.
            key=lambda spans: (
                sum(s == n for s, n in zip(spans, left, strict=True) if s > 1),
                sum(s > 1 for s in spans),
            ),
            default=(1,) * len(grid),
        )
        left = [n // s for n, s in zip(left, best, strict=True)]
        places[axis] = best
    return places


def _factorings(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not left:
        if size == 1:
            yield ()
        return
    for span in divisors(math.gcd(size, left[0])):
        for others in _factorings(size // span, left[1:]):
            yield (span, *others)
