"""State the constants of a prediction, by chip. None of them is tuned on a measured step.

- The clock is derived: the data sheet's peak FLOP/s over twice the multiply-accumulates that the
  matrix units finish in a cycle. XLA's estimates count these cycles.
- Attention kernels carry no estimate. They are taken to run the FLOPs of the blocks that they visit
  at half of the chip's peak. So are other kernels that state their FLOPs.
- Products of rows with the weights of their experts run in tiles of rows. A tile is taken to run at
  four fifths of the peak: JAX's guide to such kernels (docs.jax.dev, Pallas TPU, "Matrix
  Multiplication") measures 80 to 90 % for large products on v5e with tiles of 512 x 1024 x 1024.
- Transfers between chips are taken to reach nine tenths of the data sheet's link bandwidth.
"""

import importlib.metadata
from dataclasses import dataclass

from maxpipe.devices.chips import (
    ATTENTION_EFFICIENCY,
    GROUPED_EFFICIENCY,
    LINK_EFFICIENCY,
    Chip,
)


@dataclass(frozen=True)
class Constants:
    """What a prediction assumes of a device.

    Attributes:
      chip: short name of the chip.
      clock: cycles of its cores per second.
      peak_flops: FLOP/s of one JAX device, bfloat16.
      attention_efficiency: share of the peak that attention kernels, and others, reach.
      grouped_efficiency: share that products of experts reach while they compute a tile.
      hbm_bandwidth: bytes/s of one JAX device.
      link_bandwidth: bytes/s one way that a transfer reaches on one link of a chip within a slice,
        which its devices share, see `plan.links.group_links`.
      dcn_bandwidth: bytes/s one way to other slices; None if unknown.
    """

    chip: str
    clock: float
    peak_flops: float
    attention_efficiency: float
    grouped_efficiency: float
    hbm_bandwidth: float
    link_bandwidth: float
    dcn_bandwidth: float | None

    def text(self, crosses_slices: bool) -> str:
        dcn = ""
        if crosses_slices and self.dcn_bandwidth:
            dcn = f", DCN {self.dcn_bandwidth / 1e9:.3g} GB/s"
        attention, experts = 100 * self.attention_efficiency, 100 * self.grouped_efficiency
        return (
            f"{self.clock / 1e9:.2f} GHz, attention at {attention:.0f} % and experts at "
            f"{experts:.0f} % of peak, links {self.link_bandwidth / 1e9:.3g} GB/s, HBM "
            f"{self.hbm_bandwidth / 1e9:.0f} GB/s{dcn}"
        )


def constants_of(chip: Chip, devices_per_chip: int = 1) -> Constants | None:
    if chip.products_per_cycle is None:
        return None
    peak = chip.peak_flops["bfloat16"]
    return Constants(
        chip=chip.name,
        # A v4 chip of two JAX devices shares its matrix units among them, at the same clock.
        clock=peak / (2 * chip.products_per_cycle),
        peak_flops=peak / devices_per_chip,
        attention_efficiency=ATTENTION_EFFICIENCY,
        grouped_efficiency=GROUPED_EFFICIENCY,
        hbm_bandwidth=chip.hbm_bandwidth / devices_per_chip,
        link_bandwidth=LINK_EFFICIENCY * chip.link_bandwidth,
        dcn_bandwidth=chip.dcn_bandwidth / devices_per_chip if chip.dcn_bandwidth else None,
    )


def compiler_version() -> str:
    return importlib.metadata.version("libtpu")
