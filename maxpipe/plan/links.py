"""Find the links of a chip that groups of devices can use, and what a byte costs on them.

A collective over some mesh axes moves data only along the dimensions of the torus in which the
devices of its group differ, so that it cannot use the other links of a chip. What a group spans is
read off its devices' coordinates, or, before there are any, off the shape of the slice.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.config.rules.rule import divisors
from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import (
    CUBES,
    LINK_EFFICIENCY,
    Chip,
    coordinates,
    devices_per_chip,
    slice_of,
)
from maxpipe.plan.number import Number
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.space import Grid

# On these slices JAX takes devices in an order of its own (`jax.experimental.mesh_utils`): chips in
# the order of the mesh, numbered along the first dimension first.
_SMALL_SLICES: dict[tuple[int, ...], tuple[int, ...]] = {
    (2, 2): (0, 1, 3, 2),
    (2, 4): (0, 1, 2, 3, 7, 6, 5, 4),
}
Spans = Sequence[int]  # chips of a group in each dimension of the torus


class AxisLinks(NamedTuple):
    """Links of a chip that a mesh axis uses."""

    collectives: int
    permutes: int  # to a neighbour
    sharers: int = 1  # a chip's devices that are in separate groups, and share these links


def axis_links(sizes: Mapping[str, int], grid: Sequence[int], chip: Chip) -> dict[str, AxisLinks]:
    """Return the links of each mesh axis within a slice, from the shape of the slice alone.

    JAX lays mesh axes along the dimensions of the torus, the last axis first; this follows the same
    preference: as many whole dimensions as fit, else parts of them. Without a torus every axis has
    every link.

    Args:
      sizes: sizes of the mesh axes, in the order of the mesh; their product is the number of chips
        in the grid, or a multiple where a chip is several devices.
      grid: chips in each dimension.
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

    Devices of one chip that are in different groups share its links. The groups are partitions of
    the first slice's program, numbered in the order of the mesh.
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
    left = list(grid)
    spans: dict[str, Spans] = {}

    def preference(of_axis: Spans) -> tuple[bool, int, int]:
        """Rank whole dimensions first, then many of them."""
        parts = [n == size for n, size in zip(of_axis, left, strict=True) if n > 1]
        return all(parts), sum(parts), len(parts)

    for axis, size in reversed([*sizes.items()]):
        spans[axis] = max(_factorings(size, left), key=preference, default=(1,) * len(grid))
        left = [size // n for size, n in zip(left, spans[axis], strict=True)]
    return spans


def _factorings(size: int, left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not left:
        if size == 1:
            yield ()
        return
    for span in reversed(divisors(math.gcd(size, left[0]))):
        for others in _factorings(size // span, left[1:]):
            yield (span, *others)


class LinkCosts:
    """Seconds that a device needs to send a byte along axes of a mesh; 0 along one of size 1.

    Attributes:
      gather: seconds per byte of gathers along fsdp.
      permute: seconds per byte that goes to the next stage.
      is_whole_torus: whether fsdp has all devices of a slice whose three dimensions are closed.
        Where a chip is two devices it has not: see `sharding.torus.line_length`.
      sums_whole: whether XLA's partitioner sums whole arrays over fsdp where it could scatter. It
        does so over all chips of a slice that is larger than 2 x n (see docs/benchmarks.md, Along a
        whole torus). Where a chip is two devices nothing is known.
    """

    def __init__(self, machine: Machine, grid: Grid):
        self._machine, self._grid = machine, grid
        self._link_rate = LINK_EFFICIENCY * machine.chip.link_bandwidth
        sizes = dict(zip(MESH_AXES, grid.ici, strict=True))
        self._links = axis_links(sizes, machine.grid, machine.chip)
        self._each = {axis: self._collective(axis) for axis in MESH_AXES}
        fsdp, stage = (grid.dcn[MESH_AXES.index(axis)] for axis in ("fsdp", "stage"))
        whole_chips, torus = machine.devices == machine.num_chips, machine.chip.torus
        is_within = fsdp == 1
        spans_torus = (
            is_within and torus == CUBES and self._links["fsdp"].collectives == torus.links
        )
        self.is_whole_torus = whole_chips and spans_torus
        is_all = machine.num_chips == sizes["fsdp"] * machine.slices
        is_large = math.prod(machine.grid) > 2 * max(machine.grid)
        self.sums_whole = whole_chips and is_all and is_within and is_large
        self.gather = self._gather(spans_torus)
        self.crosses_slices = stage > 1
        self.permute = self._permute() if grid.size("stage") > 1 else 0.0

    def of(self, axis: str) -> float:
        return self._each[axis]

    def of_sum(self, *axes: str) -> Number:
        """Return the seconds per byte of a sum over n devices: 2 (n - 1) / n, over all links."""
        count = math.prod(map(self._grid.size, axes))
        return 2 * (count - 1) / count * joint(*(self._each[axis] for axis in axes))

    def scatter(self, by_partitioner: Number) -> Number:
        """Return the seconds per byte of a gradient that is summed over fsdp and cut.

        `by_partitioner` is 1 where XLA's partitioner sums it, see `sums_whole`; else 0.
        """
        by_sums = by_partitioner * self.sums_whole
        cut = self.gather if self.is_whole_torus else self.of("fsdp")
        return by_sums * 2 * self.of("fsdp") + (1.0 - by_sums) * cut

    def _collective(self, axis: str) -> float:
        grid, at = self._grid, MESH_AXES.index(axis)
        if grid.size(axis) == 1:
            return 0.0
        links = self._links[axis]
        within = links.sharers / (links.collectives * self._link_rate)
        if grid.dcn[at] == 1:
            return within
        # Between slices each device sends its part of what the slice has reduced.
        return within * (grid.ici[at] > 1) + self._between_slices() / grid.ici[at]

    def _gather(self, spans_torus: bool) -> float:
        """Return the seconds per byte of gathers along fsdp.

        Along a whole torus a gather takes two steps, first along lines, over two links, and then
        across them, over four (see `sharding.torus`). Where a chip is two devices, a gather among
        all devices of a slice is a sum of whole arrays.
        """
        machine, size, cost = self._machine, self._grid.size("fsdp"), self.of("fsdp")
        if size == 1:
            return 0.0
        if self.is_whole_torus:
            line, all_links = machine.grid[-1], self._links["fsdp"].collectives
            steps = (line - 1) / 2 + (size - line) / (all_links - 2)
            return cost * all_links * steps / (size - 1)
        is_sum = spans_torus and size * machine.slices == machine.devices
        return 2 * cost if is_sum else cost

    def _permute(self) -> float:
        if self.crosses_slices:
            return self._between_slices()
        links = self._links["stage"]
        return links.sharers / (links.permutes * self._link_rate)

    def _between_slices(self) -> float:
        """Return the seconds per byte that goes to another slice.

        The devices of a chip share its part of the host's network. If it is unknown, it is taken
        for a link, and the plan says so.
        """
        of_chip = self._machine.chip.dcn_bandwidth or self._machine.chip.link_bandwidth
        return self._machine.devices / self._machine.num_chips / of_chip


@cache
def link_costs(machine: Machine, grid: Grid) -> LinkCosts:
    return LinkCosts(machine, grid)


def joint(*costs: Number) -> Number:
    """Return the seconds per byte in collectives along several axes, which use all their links."""
    rates = [1 / cost for cost in costs if np.any(cost)]
    return 1 / sum(rates) if rates else 0.0
