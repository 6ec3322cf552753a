"""Find the links of a chip that each mesh axis can use, from the shape of the slice alone.

JAX lays mesh axes along the dimensions of the torus, the last axis first; this follows the same
preference: as many whole dimensions as fit, else parts of them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from maxpipe.config.rules.rule import divisors
from maxpipe.devices.chips import Chip


class AxisLinks(NamedTuple):
    """Links of a chip that collectives, and permutes to a neighbour, of a mesh axis use."""

    collectives: int
    permutes: int


def axis_links(sizes: Mapping[str, int], grid: Sequence[int], chip: Chip) -> dict[str, AxisLinks]:
    """Return the links of each mesh axis within a slice.

    Args:
      sizes: of the mesh axes, in the order of the mesh; their product is the chips of the grid, or
        a multiple where a chip is several devices.
      grid: chips in each dimension.
      chip: of the slice. Without a torus every axis has every link.
    """
    if chip.torus is None:
        return {axis: AxisLinks(chip.links, chip.links) for axis in sizes}
    rings = chip.torus.rings(grid)
    links = {}
    for axis, places in _places(sizes, grid).items():
        spans = [
            (span, ring and span == size)
            for span, size, ring in zip(places, grid, rings, strict=True)
            if span > 1
        ]
        collectives = sum(2 if is_ring else 1 for _, is_ring in spans)
        # A permute goes to the next device, in one dimension.
        links[axis] = AxisLinks(max(collectives, 1), 1)
    return links


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
    """Return the same where a dimension is divided among axes."""
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
            default=(1,) * len(grid),  # several devices of one chip
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
