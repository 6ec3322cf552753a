"""Make the devices that `compile.topology` names, and find the links between them.

They are those of a TPU slice that need not be there, or this machine's simulated ones. A collective
over some mesh axes moves data only along the dimensions of the torus in which the devices of its
group differ, so that it cannot use the other links of a chip.
"""

import importlib.util
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.compiling.collectives import Collective
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.imports import install_command
from maxpipe.config.slices import canonical_topology, check_grid, examples_of, num_chips
from maxpipe.devices.chips import Chip, chip_of, coordinates, slice_of
from maxpipe.planning.search.links import links_of

KEY = "compile.topology"
SIMULATED = "cpu"
PERMUTE = "collective-permute"

# Without these libtpu asks the cloud's metadata server which machine this is, and logs every
# missing answer.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# Both cores of a v4 chip as one JAX device, as the cloud runs them: JAX makes no mesh of single
# cores.
_CHIP_CONFIGS = {"v4": "megacore"}


def devices_of(config: Config) -> Sequence[jax.Device]:
    """Return the devices of `compile.topology`, over all of `compile.num_slices`.

    Must run before JAX is used for the first time.

    Raises:
      ConfigError: there is no such slice, or libtpu is not installed or does not know it.
    """
    topology = config.compile.topology
    slices = config.compile.num_slices
    # The host's own accelerator is not needed; looking for one may take long or fail.
    jax.config.update("jax_platforms", "cpu")
    if topology == SIMULATED:
        jax.config.update("jax_num_cpu_devices", max(1, config.mesh.simulated_devices))
        return jax.devices()
    topology = canonical_topology(topology)
    if chip_of(topology):  # libtpu describes grids that chips are not wired in
        try:
            check_grid(topology)
        except ValueError as error:
            raise ConfigError(Problem(KEY, str(error))) from None
    if importlib.util.find_spec("libtpu") is None:
        message = (
            f"{topology} needs libtpu, which also works without a TPU; "
            f"install it: {install_command('tpu')}"
        )
        raise ConfigError(Problem(KEY, message))
    try:
        return _described(topology, slices)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        usual = ", ".join(examples_of(topology))
        raise ConfigError(
            Problem(KEY, f"libtpu has no topology {topology}: {reason}; usual slices: {usual}")
        ) from None


def _described(topology: str, slices: int) -> Sequence[jax.Device]:
    """Return the devices of so many slices as libtpu describes them, without a TPU."""
    for name, value in _NO_MACHINE.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, int | str | tuple[int, ...]] = {"num_slices": slices} if slices > 1 else {}
    if num_chips(topology) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)  # libtpu takes hosts to have at least 2 x 2
    if chip_config := _CHIP_CONFIGS.get(topology.partition(":")[0]):
        options["chip_config_name"] = chip_config
    return topologies.get_topology_desc(topology, platform="tpu", **options).devices


def meshes_to_compile(config: Config, meshes: Sequence[Mesh]) -> list[Mesh]:
    """Return for each stage a mesh whose devices make up all slices of a topology.

    libtpu compiles no program that leaves out a slice of its topology. A stage within some of the
    slices gets devices of a topology of as many, at the same places; others stay as they are.

    Args:
      config: resolved, for `meshes`.
      meshes: of the stages.
    """
    total = len({slice_of(d) for mesh in meshes for d in mesh.devices.flat})
    described: dict[int, dict[tuple[int, ...], jax.Device]] = {}
    alone = []
    for mesh in meshes:
        slices = sorted({slice_of(d) for d in mesh.devices.flat})
        count = len(slices)
        if count == total:
            alone.append(mesh)
            continue
        if count not in described:
            devices = _described(canonical_topology(config.compile.topology), count)
            described[count] = {(slice_of(d), *_place(d)): d for d in devices}
        grid = np.empty(mesh.devices.shape, object)
        for index, d in np.ndenumerate(mesh.devices):
            grid[index] = described[count][slices.index(slice_of(d)), *_place(d)]
        alone.append(Mesh(grid, mesh.axis_names))
    return alone


def neighbour_bandwidth(meshes: Sequence[Mesh], link: float, dcn: float | None) -> float | None:
    """Return the bytes/s between neighbouring stages, of the slowest pair; None if unknown.

    Args:
      meshes: of the stages, in order; the last one sends to the first.
      link: bytes/s of one link within a slice.
      dcn: bytes/s between slices; None if unknown.
    """
    slices = [[slice_of(d) for d in mesh.devices.flat] for mesh in meshes]
    return link if all(of_stage == slices[0] for of_stage in slices) else dcn


def _place(device: jax.Device) -> tuple[int, ...]:
    """Return where a device is in its slice."""
    return (*coordinates(device), getattr(device, "core_on_chip", 0))


@dataclass(frozen=True)
class LinkUse:
    """Traffic of one device over one set of mesh axes in a step.

    Attributes:
      axes: mesh axes, such as "fsdp" or "data,fsdp".
      network: "ici", or "dcn" between slices.
      kind: "permutes" between neighbours, or "collectives" of groups.
      links: links of a chip that groups along all of the axes can use, which those along parts of
        them may not; None on DCN, where each chip has a share of its host's network cards.
      of: links of a chip in all; None on DCN.
      sent_bytes: bytes that a device sends.
      seconds: least time for these; None if the bandwidth is unknown.
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

    That is the time of the slowest set of axes, or of everything within a slice if it were spread
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
      mesh: of devices with coordinates; without these every link counts.
      chip: what the devices are.
      axes: mesh axes, separated by commas; "" if unknown, then every link counts.
      between_neighbours: for permutes, which send in two directions at most. A chip in the middle
        of an open line has a link for each; groups have to wait for those at its ends, which have
        one.
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


def group_links(mesh: Mesh, chip: Chip, groups: Sequence[Sequence[int]]) -> int:
    """Return the links of a chip that the members of any of these groups can use.

    Args:
      mesh, chip: as for `links_along`.
      groups: partitions of the first slice's program, numbered in the order of the mesh.
    """
    devices = list(mesh.devices.flat)
    first = [device for device in devices if slice_of(device) == slice_of(devices[0])]
    return _fewest_links(first, chip, [np.array(group) for group in groups])


def _fewest_links(
    devices: Sequence[jax.Device],
    chip: Chip,
    groups: Iterable[np.ndarray],
    *,
    between_neighbours: bool = False,
) -> int:
    """Return the links that each of these groups, of indices of devices, can use."""
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
    """Return the links that a group can use which takes `spans` places in each dimension."""
    if not between_neighbours:
        return links_of(spans, sizes, rings)
    # In a middle of three a chip has a neighbour on either side.
    return 2 if max(spans) > 2 else min(2, links_of(spans, sizes, rings))
