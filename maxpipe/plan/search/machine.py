"""State what a device and its links can do, as the closed forms assume."""

import math
from typing import NamedTuple

from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.slices import (
    canonical_topology,
    check_grid,
    hosts_of,
    names_kind,
    num_chips,
    num_devices,
)
from maxpipe.devices.chips import (
    ATTENTION_EFFICIENCY,
    CHIPS,
    CUBES,
    LINK_EFFICIENCY,
    MATRIX_EFFICIENCY,
    Chip,
    Tpu,
    chip_of,
)
from maxpipe.plan.search.axis_links import AxisLinks, axis_links
from maxpipe.plan.search.space import Axes, Grid

CPU = "cpu"
MOST_SIMULATED = 1024  # the product that is searched grows fast with them
MOST_GPUS = 8  # of one host
_GPUS = [chip for chip in CHIPS if chip.torus is None]
# Simulated devices share a machine whose speed is not known: only ratios of times mean anything.
_NOMINAL = Chip(
    "cpu", {"bfloat16": 1e10, "float32": 1e10}, 0.0, 1e9, 1e9, 1e9, matrix_efficiency=1.0
)


class Machine(NamedTuple):
    """The devices of a topology.

    Attributes:
      topology: "v5p:4x4x8", "cpu:8" or "H100:8".
      chip: the devices' chip.
      grid: chips in each dimension of a slice.
      devices, slices, hosts: numbers of JAX devices over all slices, of slices, and of processes.
      peak: FLOP/s of a device in the model's dtype.
      hbm: bytes/s of a device's memory.
      capacity: bytes of a device's memory; None if unknown.
      is_timed: whether the chip's figures are known, so that seconds mean seconds.
    """

    topology: str
    chip: Chip
    grid: tuple[int, ...]
    devices: int
    slices: int
    hosts: int
    peak: float
    hbm: float
    capacity: float | None
    is_timed: bool

    @property
    def is_compilable(self) -> bool:
        """Return whether there is a compiler for the devices whose estimates can be read."""
        return self.is_timed and self.chip.torus is not None

    @property
    def is_simulated(self) -> bool:
        """Return whether the devices are simulated, so that they share one machine's memory."""
        return self.chip is _NOMINAL

    @property
    def tpu(self) -> Tpu | None:
        """Return what decides how weights are gathered on a TPU; None elsewhere."""
        if self.capacity is None or not self.is_compilable:
            return None
        return Tpu(self.capacity, self.chip.longest_ring)

    @property
    def num_chips(self) -> int:
        """Return the chips of all slices."""
        count = self.slices
        for size in self.grid:
            count *= size
        return count

    @property
    def matrix_efficiency(self) -> float:
        """Return the share of the peak that matrix products reach."""
        return self.chip.matrix_efficiency or MATRIX_EFFICIENCY

    @property
    def zeros_rate(self) -> float:
        """Return how many values a device fills with zeros in a second."""
        return self.chip.memory_shares.zeros * self.hbm / 4

    def stream_rate(self, size: float) -> float:
        """Return the bytes/s that a device moves, for values of `size` bytes."""
        shares = self.chip.memory_shares
        return (shares.bfloat16 if size < 4 else shares.float32) * self.hbm

    def attention_peak(self) -> float:
        """Return the FLOP/s of attention kernels."""
        return ATTENTION_EFFICIENCY * self.peak

    def links(self, grid: Grid) -> dict[str, AxisLinks]:
        """Return the links of a chip that each axis of a mesh uses within a slice."""
        return axis_links(dict(zip(MESH_AXES, grid.ici, strict=True)), self.grid, self.chip)

    def collective_cost(self, grid: Grid, links: dict[str, AxisLinks], axis: str) -> float:
        """Return the seconds that a device needs to send a byte in collectives along an axis."""
        at = MESH_AXES.index(axis)
        of_axis = links[axis]
        rate = of_axis.collectives * LINK_EFFICIENCY * self.chip.link_bandwidth
        within = of_axis.sharers / rate
        if grid.dcn[at] == 1:
            return within
        # Between slices each device sends its part of what the slice has reduced.
        return within * (grid.ici[at] > 1) + self._dcn_cost() / grid.ici[at]

    def gather_cost(self, grid: Grid, links: dict[str, AxisLinks], axis: str) -> float:
        """Return the seconds that a device needs to send a byte in gathers along an axis.

        Along a whole torus a gather takes two steps, first along lines, over two links, and then
        across them, over four (see `sharding.torus`). Where a chip is two devices, a gather among
        all devices of a slice is a sum of whole arrays.
        """
        cost = self.collective_cost(grid, links, axis)
        size, all_links = grid.size(axis), links[axis].collectives
        if self.is_whole_torus(grid, links, axis):
            line = self.grid[-1]
            steps = (line - 1) / 2 + (size - line) / (all_links - 2)
            return cost * all_links * steps / (size - 1)
        is_sum = self._spans_torus(grid, links, axis) and size * self.slices == self.devices
        return 2 * cost if is_sum else cost

    def is_whole_torus(self, grid: Grid, links: dict[str, AxisLinks], axis: str) -> bool:
        """Return whether an axis has all devices of a slice whose three dimensions are closed.

        Where a chip is two devices it is not: see `sharding.torus.line_length`.
        """
        return self.devices == self.num_chips and self._spans_torus(grid, links, axis)

    def sums_whole(self, grid: Grid, axis: str) -> bool:
        """Return whether XLA's partitioner sums whole arrays over an axis where it could scatter.

        It does so over all chips of a slice that is larger than 2 x n (see docs/benchmarks.md,
        Along a whole torus). Where a chip is two devices nothing is known.
        """
        at = MESH_AXES.index(axis)
        is_all = self.devices == self.num_chips == grid.ici[at] * self.slices
        return is_all and grid.dcn[at] == 1 and math.prod(self.grid) > 2 * max(self.grid)

    def _spans_torus(self, grid: Grid, links: dict[str, AxisLinks], axis: str) -> bool:
        is_within = grid.dcn[MESH_AXES.index(axis)] == 1
        torus = self.chip.torus
        return is_within and torus == CUBES and links[axis].collectives == torus.links

    def permute_cost(self, grid: Grid, links: dict[str, AxisLinks]) -> float:
        """Return the seconds that a device needs to send a byte to the next stage."""
        if grid.dcn[MESH_AXES.index("stage")] > 1:
            return self._dcn_cost()
        of_axis = links["stage"]
        rate = of_axis.permutes * LINK_EFFICIENCY * self.chip.link_bandwidth
        return of_axis.sharers / rate

    def _dcn_cost(self) -> float:
        """Return the seconds that a device needs to send a byte to another slice.

        The devices of a chip share its part of the host's network. Where its bandwidth is unknown,
        a link's is taken instead, and the plan says so.
        """
        of_chip = self.chip.dcn_bandwidth or self.chip.link_bandwidth
        return self.devices / self.num_chips / of_chip


def platform_of(config: Config) -> str:
    """Return JAX's name of the platform on which a plan has placed the model."""
    return {"": "gpu", CPU: "cpu"}.get(config.compile.topology, "tpu")


def machine_of(topology: str, slices: int, config: Config) -> Machine:
    """Return the machine that a topology names: a TPU slice, cpu:DEVICES or a GPU and a number.

    Raises:
      ValueError: there is no such slice or chip (the message names the nearest), or there are more
        devices than can be priced.
    """
    name, _, number = topology.partition(":")
    dtype = config.model.dtype
    if name.lower() == CPU:
        simulated = str(max(1, config.mesh.simulated_devices))
        count = _count_of(topology, number if ":" in topology else simulated, "devices", CPU)
        _check_one_machine(topology, count, slices, MOST_SIMULATED, "simulated devices")
        return _one_host(f"{CPU}:{count}", _NOMINAL, count, dtype)
    gpu = next((chip for chip in _GPUS if chip.name.lower() == name.lower()), None)
    if gpu is not None:
        count = _count_of(topology, number, "GPUs", gpu.name)
        what = "GPUs, those of one host: what is between hosts has no price"
        _check_one_machine(topology, count, slices, MOST_GPUS, what)
        return _one_host(f"{gpu.name}:{count}", gpu, count, dtype)
    if not names_kind(topology):
        gpus = ", ".join(chip.name for chip in _GPUS)
        raise ValueError(
            f"there is no chip {topology!r}: give a TPU slice, such as v5p:4x4x4 or v5p-128, GPUs "
            f"of one host ({gpus}), such as H100:8, or cpu:8"
        )
    try:
        canonical = canonical_topology(topology)
    except ValueError as error:
        if ":" in topology or "-" in topology:
            raise
        remedy = "with --smallest the smallest that trains the model is found"
        raise ValueError(f"{error}; {remedy}") from None
    check_grid(canonical)
    chip = chip_of(canonical)
    assert chip is not None, canonical
    per_chip = num_devices(canonical) // num_chips(canonical)
    sizes: Axes = tuple(int(size) for size in canonical.partition(":")[2].split("x"))
    return Machine(
        topology=canonical,
        chip=chip,
        grid=sizes,
        devices=num_devices(canonical) * slices,
        slices=slices,
        hosts=hosts_of(canonical) * slices,
        peak=chip.peak_flops[dtype] / per_chip,
        hbm=chip.hbm_bandwidth / per_chip,
        capacity=chip.hbm_bytes / per_chip,
        is_timed=True,
    )


def _one_host(topology: str, chip: Chip, count: int, dtype: str) -> Machine:
    is_timed = chip is not _NOMINAL
    return Machine(
        topology=topology,
        chip=chip,
        grid=(count,),
        devices=count,
        slices=1,
        hosts=1,
        peak=chip.peak_flops[dtype],
        hbm=chip.hbm_bandwidth,
        capacity=chip.hbm_bytes if is_timed else None,
        is_timed=is_timed,
    )


def _count_of(topology: str, number: str, what: str, name: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"{topology!r}: give the number of {what}, such as {name}:8")
    return int(number)


def _check_one_machine(topology: str, count: int, slices: int, most: int, what: str) -> None:
    """Raise ValueError unless devices other than TPUs are those of one machine."""
    if count > most:
        raise ValueError(f"{topology}: give at most {most} {what}")
    if slices > 1:
        message = f"{topology} is one machine; compile.num_slices={slices} joins slices of a TPU"
        raise ValueError(f"{message}, so leave it out")
