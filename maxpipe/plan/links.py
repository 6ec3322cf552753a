"""Find the links of a chip that groups of devices can use.

A collective over some mesh axes moves data only along the dimensions of the torus in which the
devices of its group differ, so that it cannot use the other links of a chip. What a group spans is
read off its devices' coordinates, or, before there are any, off the shape of the slice.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.config.rules.rule import divisors
from maxpipe.devices.chips import Chip, coordinates, devices_per_chip, slice_of

# On these slices JAX takes devices in an order of its own (`jax.experimental.mesh_utils`): chips in
# the order of the mesh, numbered along the first dimension first.
_SMALL_SLICES: dict[tuple[int, ...], tuple[int, ...]] = {
    (2, 2): (0, 1, 3, 2),
    (2, 4): (0, 1, 2, 3, 7, 6, 5, 4),
}
Spans = Sequence[int]  # chips of a group in each dimension of the torus


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
    """Return the links of each mesh axis within a slice, from the shape of the slice alone.

    JAX lays mesh axes along the dimensions of the torus, the last axis first; this follows the same
    preference: as many whole dimensions as fit, else parts of them.

    Args:
      sizes: sizes of the mesh axes, in the order of the mesh; their product is the number of chips
        in the grid, or a multiple where a chip is several devices.
      grid: chips in each dimension.
      chip: the slice's chip. Without a torus every axis has every link.
    """
    if chip.torus is None:
        return {axis: AxisLinks(chip.links, chip.links) for axis in sizes}
    # The devices of one chip count as a further dimension, which has no links.
    per_chip = max(1, math.prod(sizes.values()) // math.prod(grid))
    order = _SMALL_SLICES.get(tuple(grid)) if chip.torus.dimensions == 2 else None
    spans: dict[str, list[Spans]]
    if order is not None:
        places = np.array([(place % grid[0], place // grid[0]) for place in order])
        mesh = np.arange(len(order)).reshape([*sizes.values()])
        spans = {
            axis: [_spans(places[group]) for group in _groups(mesh, [number])]
            for number, axis in enumerate(sizes)
        }
    else:
        spans = {axis: [each] for axis, each in _spans_of_axes(sizes, [*grid, per_chip]).items()}
    chips, rings = len(grid), chip.torus.rings(grid)
    # A permute goes to the next device, in one dimension.
    return {
        axis: AxisLinks(
            _fewest([each[:chips] for each in groups], grid, rings),
            1,
            per_chip // math.prod(groups[0][chips:]),
        )
        for axis, groups in spans.items()
    }


def links_along(mesh: Mesh, chip: Chip, axes: str, *, between_neighbours: bool = False) -> int:
    """Return the links of a chip that groups along these mesh axes can use, within a slice.

    Args:
      mesh: the mesh of the devices; if they have no coordinates, every link counts.
      chip: the chip of the devices.
      axes: mesh axes, separated by commas; "" if unknown, then every link counts.
      between_neighbours: whether to count for permutes, which send in two directions at most. A
        chip in the middle of an open line has a link for each; groups have to wait for the chips
        at its ends, which have one.
    """
    names = [name for name in axes.split(",") if name]
    if not names:
        return chip.links
    index = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    groups = _groups(index, [list(mesh.axis_names).index(name) for name in names])
    devices = [*mesh.devices.flat]
    return _links_of_groups(devices, chip, groups, between_neighbours=between_neighbours)


def group_links(mesh: Mesh, chip: Chip, groups: Sequence[Sequence[int]]) -> float:
    """Return the links that each member of any of these groups can use.

    Devices of one chip that are in different groups share its links.

    Args:
      mesh, chip: as for `links_along`.
      groups: partitions of the first slice's program, numbered in the order of the mesh.
    """
    devices = list(mesh.devices.flat)
    first = [device for device in devices if slice_of(device) == slice_of(devices[0])]
    links = _links_of_groups(first, chip, [np.array(group) for group in groups])
    together = (Counter(coordinates(first[n]) for n in group) for group in groups)
    return links * min(max(chips.values()) for chips in together) / devices_per_chip(first)


def _links_of_groups(
    devices: Sequence[jax.Device],
    chip: Chip,
    groups: Iterable[np.ndarray],
    *,
    between_neighbours: bool = False,
) -> int:
    """Return the number of links that each of these groups of device indices can use."""
    if chip.torus is None or not coordinates(devices[0]):
        return chip.links
    places = np.array([coordinates(d)[: chip.torus.dimensions] for d in devices])
    slices = np.array([slice_of(d) for d in devices])
    sizes = (np.ptp(places[slices == slices[0]], axis=0) + 1).tolist()
    spans = [_spans(places[group[slices[group] == slices[group[0]]]]) for group in groups]
    return _fewest(spans, sizes, chip.torus.rings(sizes), between_neighbours=between_neighbours)


def _groups(mesh: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return the groups along some axes of a mesh of numbers, [groups, devices of a group]."""
    along_last = np.moveaxis(mesh, axes, range(-len(axes), 0))
    return along_last.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def _spans(places: np.ndarray) -> tuple[int, ...]:
    """Return the chips that places [devices, dimensions] span in each dimension."""
    return tuple(len(np.unique(column)) for column in places.T)


def _fewest(
    groups: Iterable[Spans],
    sizes: Sequence[int],
    rings: Sequence[bool],
    *,
    between_neighbours: bool = False,
) -> int:
    """Return the links of the group with the fewest, which decides.

    Groups of one chip, such as two cores, use none, and count as one; bounds must stay finite.
    """

    def links(spans: Spans) -> int:
        dimensions = zip(spans, sizes, rings, strict=True)
        count = sum(1 + (is_ring and n == size) for n, size, is_ring in dimensions if n > 1)
        if between_neighbours:
            # In a line of three, the chip in the middle has a neighbour on either side.
            return 2 if max(spans) > 2 else min(2, count)
        return count

    return max(1, min(map(links, groups)))


def _spans_of_axes(sizes: Mapping[str, int], grid: Sequence[int]) -> dict[str, Spans]:
    """Return the chips that a group of each axis spans in each dimension."""
    left = list(grid)
    spans: dict[str, Spans] = {}
    for axis, size in reversed([*sizes.items()]):
        whole = next(_whole_dimensions(size, left), None)
        if whole is None:
            return _split_spans(sizes, grid)
        spans[axis] = [left[d] if d in whole else 1 for d in range(len(grid))]
        left = [0 if d in whole else count for d, count in enumerate(left)]
    return spans


def _whole_dimensions(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if size == 1:
        yield ()
    for count in range(len(left), 0, -1):
        for dimensions in itertools.combinations(range(len(left)), count):
            if math.prod(left[d] for d in dimensions) == size:
                yield dimensions


def _split_spans(sizes: Mapping[str, int], grid: Sequence[int]) -> dict[str, Spans]:
    """Return the chips that a group of each axis spans, where a dimension is divided among axes."""
    left = list(grid)
    spans: dict[str, Spans] = {}

    def preference(of_axis: Spans) -> tuple[int, int]:
        """Rank whole dimensions first, then many of them."""
        whole = sum(n == size for n, size in zip(of_axis, left, strict=True) if n > 1)
        return whole, sum(n > 1 for n in of_axis)

    for axis, size in reversed([*sizes.items()]):
        spans[axis] = max(_factorings(size, left), key=preference, default=(1,) * len(grid))
        left = [size // n for size, n in zip(left, spans[axis], strict=True)]
    return spans


def _factorings(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not left:
        if size == 1:
            yield ()
        return
    for span in divisors(math.gcd(size, left[0])):
        for others in _factorings(size // span, left[1:]):
            yield (span, *others)
