"""State what a device and its links can do, as the closed forms assume."""

import math
from dataclasses import dataclass, field

from maxpipe.config.sections import Config
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
    GROUPED_EFFICIENCY,
    MATRIX_EFFICIENCY,
    ROW_TILE,
    Chip,
    Tpu,
    chip_of,
)

CPU = "cpu"
MOST_SIMULATED = 1024  # the product that is searched grows fast with them
MOST_GPUS = 8  # of one host, since what is between hosts has no price
_GPUS = [chip for chip in CHIPS if chip.torus is None]
# Simulated devices share a machine whose speed is not known: only ratios of times mean anything.
_NOMINAL = Chip(
    "cpu", {"bfloat16": 1e10, "float32": 1e10}, 0.0, 1e9, 1e9, 1e9, matrix_efficiency=1.0
)


@dataclass(frozen=True)
class Machine:
    """The devices of a topology."""

    topology: str  # "v5p:4x4x8", "cpu:8" or "H100:8"
    chip: Chip = field(hash=False)
    grid: tuple[int, ...]  # chips in each dimension of a slice
    devices: int  # of JAX, over all slices
    slices: int
    hosts: int
    peak: float  # FLOP/s of a device in the model's dtype
    hbm: float  # bytes/s of a device's memory
    capacity: float | None  # bytes of a device's memory; None if unknown

    @property
    def is_timed(self) -> bool:
        """Return whether the chip's figures are known, so that seconds mean seconds."""
        return self.chip is not _NOMINAL

    @property
    def is_compilable(self) -> bool:
        """Return whether there is a compiler for the devices whose estimates can be read."""
        return self.is_timed and self.chip.torus is not None

    @property
    def tpu(self) -> Tpu | None:
        """Return what decides how weights are gathered on a TPU; None elsewhere."""
        if self.capacity is None or not self.is_compilable:
            return None
        return Tpu(self.capacity, self.chip.longest_ring)

    @property
    def num_chips(self) -> int:
        return self.slices * math.prod(self.grid)

    @property
    def matrix_peak(self) -> float:
        return self.peak * (self.chip.matrix_efficiency or MATRIX_EFFICIENCY)

    @property
    def attention_peak(self) -> float:
        return self.peak * ATTENTION_EFFICIENCY

    @property
    def grouped_peak(self) -> float:
        """Return the FLOP/s of products of rows with their experts' weights."""
        return self.peak * (GROUPED_EFFICIENCY if self.chip.torus else ATTENTION_EFFICIENCY)

    @property
    def row_tile(self) -> int:
        """Return the rows of a tile of such products; 0 where they have none."""
        return ROW_TILE if self.chip.torus else 0

    def stream_rate(self, size: float) -> float:
        shares = self.chip.memory_shares
        return (shares.bfloat16 if size < 4 else shares.float32) * self.hbm


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
    one_host = [chip for chip in (_NOMINAL, *_GPUS) if chip.name.lower() == name.lower()]
    if one_host:
        if topology.lower() == CPU:
            number = str(max(1, config.mesh.simulated_devices))
        return _one_host(topology, one_host[0], number, slices, config.model.dtype)
    if not names_kind(topology):
        gpus = ", ".join(chip.name for chip in _GPUS)
        raise ValueError(
            f"there is no chip {topology!r}: give a TPU slice, such as v5p:4x4x4 or v5p-128, GPUs "
            f"of one host ({gpus}), such as H100:8, or cpu:8"
        )
    try:
        canonical = canonical_topology(topology)
    except ValueError as error:
        raise ValueError(f"{error}; --smallest finds a slice of a kind") from None
    check_grid(canonical)
    chip = chip_of(canonical)
    assert chip is not None, canonical
    per_chip = num_devices(canonical) // num_chips(canonical)
    return Machine(
        topology=canonical,
        chip=chip,
        grid=tuple(int(size) for size in canonical.partition(":")[2].split("x")),
        devices=num_devices(canonical) * slices,
        slices=slices,
        hosts=hosts_of(canonical) * slices,
        peak=chip.peak_flops[config.model.dtype] / per_chip,
        hbm=chip.hbm_bandwidth / per_chip,
        capacity=chip.hbm_bytes / per_chip,
    )


def _one_host(topology: str, chip: Chip, number: str, slices: int, dtype: str) -> Machine:
    is_simulated = chip is _NOMINAL
    what, most = (
        ("simulated devices", MOST_SIMULATED) if is_simulated else ("GPUs of one host", MOST_GPUS)
    )
    if not number.isdecimal() or not 1 <= int(number) <= most:
        raise ValueError(f"{topology!r}: give 1 to {most} {what}, such as {chip.name}:8")
    if slices > 1:
        message = f"{topology} is one machine; compile.num_slices={slices} joins slices of a TPU"
        raise ValueError(f"{message}, so leave it out")
    return Machine(
        topology=f"{chip.name}:{number}",
        chip=chip,
        grid=(int(number),),
        devices=int(number),
        slices=1,
        hosts=1,
        peak=chip.peak_flops[dtype],
        hbm=chip.hbm_bandwidth,
        capacity=None if is_simulated else chip.hbm_bytes,
    )
