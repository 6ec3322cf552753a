"""Find the links of a chip that collectives can use, and the least time of their traffic.

A collective over some mesh axes moves data only along the dimensions of the torus in which the
devices of its group differ, so that it cannot use the other links of a chip.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.compile.collectives import Collective
from maxpipe.devices.chips import Chip, coordinates, devices_per_chip, slice_of
from maxpipe.plan.search.axis_links import links_of

PERMUTE = "collective-permute"


@dataclass(frozen=True)
class LinkUse:
    """Traffic of one device over one set of mesh axes in a step.

    Attributes:
      axes: mesh axes, such as "fsdp" or "data,fsdp".
      network: "ici", or "dcn" between slices.
      kind: "permutes" between neighbours, or "collectives" of groups.
      links: links of a chip that groups along all of the axes can use, though groups along some
        of them may not; None on DCN, where each chip has a share of its host's network cards.
      of: number of all links of a chip; None on DCN.
      sent_bytes: bytes that a device sends.
      seconds: least time to send them; None if the bandwidth is unknown.
    """

    axes: str
    network: str
    kind: str
    links: int | None
    of: int | None
    sent_bytes: float
    seconds: float | None


def link_uses(collectives: Sequence[Collective], mesh: Mesh, chip: Chip) -> list[LinkUse]:
    """Return the traffic over each set of mesh axes, the slowest first."""
    sent: dict[tuple[str, str, str], float] = {}
    for collective in collectives:
        if collective.sent_bytes:
            kind = "permutes" if collective.kind == PERMUTE else "collectives"
            place = (collective.axes, collective.network, kind)
            sent[place] = sent.get(place, 0.0) + collective.sent_bytes
    uses = [_use(mesh, chip, *place, size) for place, size in sent.items()]
    return sorted(uses, key=lambda use: -(use.seconds or 0.0))


def network_seconds(uses: Sequence[LinkUse], chip: Chip) -> float | None:
    """Return the least seconds for all traffic of a step; None if a needed bandwidth is unknown.

    That is the time of the slowest set of axes, or, if longer, of all traffic within a slice spread
    over all links of a chip.
    """
    seconds = [use.seconds for use in uses]
    known = [time for time in seconds if time is not None]
    if len(known) < len(seconds):
        return None
    within = sum(use.sent_bytes for use in uses if use.network == "ici")
    return max([*known, within / chip.ici_bandwidth])


def _use(mesh: Mesh, chip: Chip, axes: str, network: str, kind: str, size: float) -> LinkUse:
    if network == "dcn":
        seconds = size / chip.dcn_bandwidth if chip.dcn_bandwidth else None
        return LinkUse(axes, network, kind, None, None, size, seconds)
    links = links_along(mesh, chip, axes, between_neighbours=kind == "permutes")
    return LinkUse(
        axes, network, kind, links, chip.links, size, size / (links * chip.link_bandwidth)
    )


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
    grid = mesh.devices
    # [groups, devices of a group]: indices of devices in the flat mesh
    index = np.arange(grid.size).reshape(grid.shape)
    along = [list(mesh.axis_names).index(name) for name in names]
    along_last = np.moveaxis(index, along, range(-len(along), 0))
    groups = along_last.reshape(-1, math.prod(grid.shape[axis] for axis in along))
    devices = list(grid.flat)
    return _fewest_links(devices, chip, groups, between_neighbours=between_neighbours)


def group_links(mesh: Mesh, chip: Chip, groups: Sequence[Sequence[int]]) -> float:
    """Return the links that each member of any of these groups can use.

    Devices of one chip that are in different groups share its links.

    Args:
      mesh, chip: as for `links_along`.
      groups: partitions of the first slice's program, numbered in the order of the mesh.
    """
    devices = list(mesh.devices.flat)
    first = [device for device in devices if slice_of(device) == slice_of(devices[0])]
    links = _fewest_links(first, chip, [np.array(group) for group in groups])
    together = (Counter(coordinates(first[n]) for n in group) for group in groups)
    return links * min(max(chips.values()) for chips in together) / devices_per_chip(first)


def _fewest_links(
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
    sizes = np.ptp(places[slices == slices[0]], axis=0) + 1
    rings = chip.torus.rings(sizes.tolist())
    counts = []
    for group in groups:
        of_slice = group[slices[group] == slices[group[0]]]
        spans = [len(np.unique(column)) for column in places[of_slice].T]
        counts.append(_group_links(spans, sizes.tolist(), rings, between_neighbours))
    # Groups of one chip, such as two cores, use none; the bound must stay finite.
    return max(min(counts), 1)


def _group_links(
    spans: Sequence[int], sizes: Sequence[int], rings: Sequence[bool], between_neighbours: bool
) -> int:
    """Return the links that a group which takes `spans` places in each dimension can use."""
    if not between_neighbours:
        return links_of(spans, sizes, rings)
    # In a line of three, the chip in the middle has a neighbour on either side.
    return 2 if max(spans) > 2 else min(2, links_of(spans, sizes, rings))
