"""Price transfers along mesh axes: what a byte costs on the links that each axis has."""

import math
from functools import cache

import numpy as np

from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import CUBES, LINK_EFFICIENCY
from maxpipe.plan.links import axis_links
from maxpipe.plan.number import Number
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.space import Grid


class LinkCosts:
    """Seconds that a device needs to send a byte along axes of a mesh; 0 along one of size 1.

    Attributes:
      gather: seconds per byte of gathers along fsdp.
      permute: seconds per byte that goes to the next stage.
      crosses_slices: whether stages are on several slices.
      is_whole_torus: whether fsdp has all devices of a slice whose three dimensions are closed.
        Where a chip is two devices it has not: see `sharding.torus.line_length`.
      sums_whole: whether XLA's partitioner sums whole arrays over fsdp where it could scatter. It
        does so over all chips of a slice that is larger than 2 x n (see docs/benchmarks.md, Along a
        whole torus). Where a chip is two devices nothing is known.
    """

    def __init__(self, machine: Machine, grid: Grid):
        self._machine, self._grid = machine, grid
        sizes = dict(zip(MESH_AXES, grid.ici, strict=True))
        self._links = axis_links(sizes, machine.grid, machine.chip)
        self._each = {axis: self._collective(axis) for axis in MESH_AXES}
        fsdp, stage = (MESH_AXES.index(axis) for axis in ("fsdp", "stage"))
        whole_chips, torus = machine.devices == machine.num_chips, machine.chip.torus
        is_within = grid.dcn[fsdp] == 1
        spans_torus = (
            is_within and torus == CUBES and self._links["fsdp"].collectives == torus.links
        )
        self.is_whole_torus = whole_chips and spans_torus
        is_all = machine.num_chips == grid.ici[fsdp] * machine.slices
        is_large = math.prod(machine.grid) > 2 * max(machine.grid)
        self.sums_whole = whole_chips and is_all and is_within and is_large
        self.gather = self._gather(spans_torus)
        self.crosses_slices = grid.dcn[stage] > 1
        self.permute = self._permute() if grid.size("stage") > 1 else 0.0

    def of(self, axis: str) -> float:
        """Return the seconds per byte of collectives along an axis."""
        return self._each[axis]

    def of_sum(self, *axes: str) -> Number:
        """Return the seconds per byte of a sum over n devices: 2 (n - 1) / n, over all links."""
        count = math.prod(map(self._grid.size, axes))
        return 2 * (count - 1) / count * joint(*(self._each[axis] for axis in axes))

    def scatter(self, by_partitioner: Number) -> Number:
        """Return the seconds per byte of a gradient that is summed over fsdp and cut.

        Args:
          by_partitioner: 1 where XLA's partitioner sums it, see `sums_whole`; else 0.
        """
        by_sums = by_partitioner * self.sums_whole
        cut = self.gather if self.is_whole_torus else self.of("fsdp")
        return by_sums * 2 * self.of("fsdp") + (1.0 - by_sums) * cut

    def _collective(self, axis: str) -> float:
        grid, at = self._grid, MESH_AXES.index(axis)
        if grid.size(axis) == 1:
            return 0.0
        links = self._links[axis]
        within = links.sharers / (links.collectives * self._link_rate())
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
        return links.sharers / (links.permutes * self._link_rate())

    def _link_rate(self) -> float:
        return LINK_EFFICIENCY * self._machine.chip.link_bandwidth

    def _between_slices(self) -> float:
        """Return the seconds per byte that goes to another slice.

        The devices of a chip share its part of the host's network. Where its bandwidth is unknown,
        a link's is taken instead, and the plan says so.
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
