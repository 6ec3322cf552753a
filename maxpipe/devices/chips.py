"""State what accelerators can do at best, per JAX device, from the vendors' public data sheets.

TPUs: https://cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x. NVIDIA: the data sheets of
A100 80GB SXM, H100 SXM, H200 SXM and HGX B200, without sparsity; network cards as in the DGX system
of the generation, one per GPU.

Conventions: FLOP/s and bytes/s, 10^9 per giga; bandwidths of links are per chip and per direction
(what data sheets call bidirectional is halved), ICI summed over all links of a chip, NVLink in the
place of ICI on GPUs. A v5p chip is one JAX device, its two cores working as one; a v4 chip is one
or two, a tpu7x chip two.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from maxpipe.config.slices import num_chips, num_devices

GB = 1e9
GIB = 2**30
TERA = 1e12

# What predictions assume; none is tuned on a measured step.
ATTENTION_EFFICIENCY = 0.5  # share of the peak that attention kernels reach
# Share of the peak that a TPU's products of experts reach in a tile of rows; see the constants of
# `compile.prediction`.
GROUPED_EFFICIENCY = 0.8
ROW_TILE = 512  # rows of such a tile
LINK_EFFICIENCY = 0.9  # share of a link's bandwidth that transfers reach
MATRIX_EFFICIENCY = 0.9  # share of the peak that matrix products reach on chips without a figure


class Device(Protocol):
    """The facts of a `jax.Device` that are read here; TPUs also have `coords` and a slice."""

    @property
    def device_kind(self) -> str: ...

    @property
    def platform(self) -> str: ...


class Torus(NamedTuple):
    """How the chips of a slice are wired: to two neighbours in each dimension."""

    dimensions: int
    ring_size: int  # a dimension whose size is a multiple of this is closed to a ring
    all_or_none: bool  # whether dimensions are closed only if all of them can be

    @property
    def links(self) -> int:
        """Return the number of links of a chip."""
        return 2 * self.dimensions

    def rings(self, sizes: Sequence[int]) -> list[bool]:
        """Return which dimensions of a slice of these sizes are closed to rings."""
        closed = [size % self.ring_size == 0 for size in sizes]
        return [all(closed)] * len(closed) if self.all_or_none else closed


# Slices of whole 4 x 4 x 4 cubes are joined by optical switches, which also close them.
CUBES = Torus(dimensions=3, ring_size=4, all_or_none=True)
# A pod is 16 x 16; only a dimension that spans it is closed.
POD = Torus(dimensions=2, ring_size=16, all_or_none=False)


class MemoryShares(NamedTuple):
    """Shares of a memory's bandwidth that programs reach by XLA's own estimates.

    Arrays are of 8192 x 8192 values, compiled for one chip with libtpu 0.0.42 by
    `scripts/benchmark/memory_shares.py`; 1 where XLA has not been asked.
    """

    float32: float = 1.0  # for an update by Adam
    bfloat16: float = 1.0  # for SwiGLU


_WHOLE = MemoryShares()


class Tpu(NamedTuple):
    """Facts that decide how often and how a TPU gathers weights."""

    memory: float  # bytes of a JAX device
    longest_ring: int  # as in `Chip`


@dataclass(frozen=True)
class Chip:
    """Peak figures of one accelerator.

    Attributes:
      peak_flops: FLOP/s of dense matrix products, by `model.dtype`. float32 is what XLA runs at its
        default precision: one bfloat16 pass on TPUs, TF32 on GPUs.
      ici_bandwidth: bytes/s one way to the other chips of the slice, or of the NVLink domain.
      dcn_bandwidth: bytes/s one way to other slices or nodes, its share of the host's; None if
        unpublished.
      torus: how chips of a slice are wired; None for a switch, which gives any pair the full
        `ici_bandwidth`.
      products_per_cycle: multiply-accumulates that its matrix units finish in a cycle; None if
        unpublished.
      matrix_efficiency: share of the peak that large products reach by XLA's own estimates, squares
        of 2048 to 8192 in bfloat16 compiled for one chip with libtpu 0.0.42; None where XLA has
        not been asked.
      has_fp8: whether products of 8-bit floats are faster than those of bfloat16.
      longest_ring: largest mesh axis fsdp that passes weights on in steps by default. Up to there
        steps are faster than all-gathers, by the same estimates, and compile in minutes; see
        docs/benchmarks.md.
    """

    name: str
    peak_flops: Mapping[str, float]
    hbm_bytes: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float | None
    torus: Torus | None = None
    products_per_cycle: int | None = None
    matrix_efficiency: float | None = None
    memory_shares: MemoryShares = _WHOLE
    has_fp8: bool = False
    longest_ring: int = 1

    @property
    def links(self) -> int:
        """Return the number of links of a chip within its slice; 1 to a switch."""
        return self.torus.links if self.torus else 1

    @property
    def link_bandwidth(self) -> float:
        """Return the bytes/s one way of one link within a slice."""
        return self.ici_bandwidth / self.links


def _peaks(bfloat16: float, float32: float) -> dict[str, float]:
    return {"bfloat16": bfloat16 * TERA, "float32": float32 * TERA}


CHIPS = (
    # Matrix units have 128 x 128 multipliers; those of v6e have 256 x 256.
    Chip(
        "v4",
        _peaks(275, 275),
        32 * GIB,
        1200 * GB,
        300 * GB,
        None,
        CUBES,
        8 * 128**2,
        longest_ring=8,
    ),
    # 2 network cards of 100 Gbit/s for 8 chips.
    Chip(
        "v5e",
        _peaks(197, 197),
        16 * GB,
        819 * GB,
        200 * GB,
        3.125 * GB,
        POD,
        4 * 128**2,
        0.92,
        MemoryShares(0.80, 0.49),
        longest_ring=2,
    ),
    # 50 Gbit/s per chip.
    Chip(
        "v5p",
        _peaks(459, 459),
        95 * GIB,
        2765 * GB,
        600 * GB,
        6.25 * GB,
        CUBES,
        8 * 128**2,
        0.91,
        MemoryShares(0.71, 0.44),
        longest_ring=8,
    ),
    # 4 network cards of 200 Gbit/s for 8 chips.
    Chip(
        "v6e",
        _peaks(918, 918),
        32 * GB,
        1638 * GB,
        400 * GB,
        12.5 * GB,
        POD,
        4 * 256**2,
        0.72,
        MemoryShares(0.89, 0.50),
        longest_ring=8,
    ),
    # 100 Gbit/s per chip.
    Chip(
        "tpu7x",
        _peaks(2307, 2307),
        192 * GIB,
        7380 * GB,
        600 * GB,
        12.5 * GB,
        CUBES,
        has_fp8=True,
        longest_ring=8,  # as on v5p: without a clock XLA's cycles cannot be converted
    ),
    Chip("A100", _peaks(312, 156), 80 * GB, 2039 * GB, 300 * GB, 25 * GB),
    Chip("H100", _peaks(989.4, 494.7), 80 * GB, 3350 * GB, 450 * GB, 50 * GB, has_fp8=True),
    Chip("H200", _peaks(989.4, 494.7), 141 * GB, 4800 * GB, 450 * GB, 50 * GB, has_fp8=True),
    Chip("B200", _peaks(2250, 1125), 180 * GB, 7700 * GB, 900 * GB, 50 * GB, has_fp8=True),
)

_BY_NAME = {chip.name: chip for chip in CHIPS}
_TPU_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# Cut-down variants share a name with the full chip but not its figures, nor always its memory;
# unknown is better than wrong.
_OTHER_VARIANTS = ("PCIe", "NVL", "MIG")


def chip_of(topology: str) -> Chip | None:
    """Return the chip of a `compile.topology` such as v5p:4x4x4; None if the table lacks it."""
    return _BY_NAME.get(topology.partition(":")[0])


def chip_for(device_kind: str) -> Chip | None:
    """Return the chip of a device kind, such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    if device_kind.startswith("TPU"):
        name = _TPU_KINDS.get(device_kind)
        return _BY_NAME[name] if name else None
    words = device_kind.replace("-", " ").split()
    if any(variant in word for word in words for variant in _OTHER_VARIANTS):
        return None
    chip = next((_BY_NAME[word] for word in words if word in _BY_NAME), None)
    sizes = {float(word[:-2]) * GB for word in words if re.fullmatch(r"\d+GB", word)}
    return chip if chip and sizes <= {chip.hbm_bytes} else None


def short_name(device_kind: str) -> str:
    """Return the usual name of a device kind: "TPU v5p" for JAX's "TPU v5"."""
    chip = chip_for(device_kind)
    if chip is None or not device_kind.startswith("TPU"):
        return device_kind
    return device_kind if device_kind.endswith(chip.name[-2:]) else f"TPU {chip.name}"


def explain_quantisation(quantisation: str, device: Device) -> list[str]:
    """Return a line if this `model.quantisation` makes training slower on the device, else none."""
    chip = chip_for(device.device_kind)
    if quantisation != "fp8" or chip is None or chip.has_fp8:
        return []
    kind = short_name(device.device_kind)
    return [f"{kind} has no units for fp8: model.quantisation=fp8 is slower than bfloat16"]


def coordinates(device: Device) -> tuple[int, ...]:
    """Return the place of a device's chip in its slice; empty where devices have none."""
    return tuple(getattr(device, "coords", ()))


def slice_of(device: Device) -> int:
    """Return the index of a device's slice, its ICI domain; 0 where there is only one."""
    return getattr(device, "slice_index", 0) or 0


def devices_per_chip(devices: Sequence[Device]) -> int:
    """Return how many devices share a chip: 2 on a tpu7x and on a v4 without megacore, else 1."""
    if devices[0].platform != "tpu":
        return 1
    return max(Counter((slice_of(d), coordinates(d)) for d in devices).values())


def device_memory(devices: Sequence[Device]) -> float | None:
    """Return the bytes that one of these devices may hold, None for an unknown chip."""
    chip = chip_for(devices[0].device_kind)
    return chip.hbm_bytes / devices_per_chip(devices) if chip else None


def tpu_of(devices: Sequence[Device]) -> Tpu | None:
    """Return what planning knows about one of these TPUs; None if unknown or not a TPU."""
    memory, chip = device_memory(devices), chip_for(devices[0].device_kind)
    if devices[0].platform != "tpu" or memory is None or chip is None:
        return None
    return Tpu(memory, chip.longest_ring)


def topology_memory(topology: str) -> float | None:
    """Return the bytes of a device of a canonical topology, None for an unknown chip."""
    chip = chip_of(topology)
    return chip.hbm_bytes * num_chips(topology) / num_devices(topology) if chip else None
