"""How fast a step could be at best: what each part of the machine would need if it did nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxpipe.compiling.collectives import Collective
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip
from maxpipe.planning.estimate import Memory
from maxpipe.planning.flops import parameter_count
from maxpipe.planning.footprint import axis_size, layer_widths, microbatch_tokens

# Passes over weights and activations: forward, recomputation, gradients for inputs and for weights.
_PASSES = 4


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, each as if the others were free.

    Attributes:
      compute: FLOPs at the chip's peak; the bubble is inside, since idle slots are computed masked.
      hbm: weights, optimizer state and activations through memory, counted from shapes.
      network: the slower of ICI and DCN, every link of a chip busy; None if a needed bandwidth is
        unknown.
      mfu: model FLOPs utilisation of a step that takes as long as the largest of these.
    """

    compute: float
    hbm: float
    network: float | None
    mfu: float

    @property
    def step(self) -> float:
        return max(self.compute, self.hbm, self.network or 0.0)


def bounds(
    config: Config,
    chip: Chip,
    *,
    num_chips: int,
    flops: float,
    model_flops: float,
    memory: Memory,
    collectives: Sequence[Collective],
) -> Bounds:
    """Bounds of a compiled step.

    Args:
      config: resolved.
      chip: what it runs on.
      num_chips: chips of the mesh.
      flops, model_flops: of a step over all devices.
      memory: estimate for one device.
      collectives: of one device.
    """
    peak = chip.peak_flops[config.model.dtype]
    compute = flops / num_chips / peak
    hbm = traffic(config, memory) / chip.hbm_bandwidth
    network = _network(chip, collectives)
    step = max(compute, hbm, network or 0.0)
    return Bounds(compute, hbm, network, model_flops / num_chips / peak / step)


def traffic(config: Config, memory: Memory) -> float:
    """Least bytes that a device moves to and from its memory in a step."""
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    # Whole over fsdp, since every device multiplies with all of its stage's weights, once a
    # microbatch.
    stage_weights = parameter_count(config.model) / (
        axis_size(config, "stage") * axis_size(config, "tensor")
    )
    weights = _PASSES * itemsize * stage_weights * config.pipeline.num_microbatches
    update = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    tokens = microbatch_tokens(config) * config.pipeline.num_microbatches
    width = 2 * sum(layer_widths(config).values())  # written once, read once
    layers = config.model.num_layers / axis_size(config, "stage")
    return weights + update + _PASSES * itemsize * tokens * layers * width


def _network(chip: Chip, collectives: Sequence[Collective]) -> float | None:
    sent = {
        network: sum(c.sent_bytes for c in collectives if c.network == network)
        for network in ("ici", "dcn")
    }
    if sent["dcn"] and chip.dcn_bandwidth is None:
        return None
    return max(sent["ici"] / chip.ici_bandwidth, sent["dcn"] / (chip.dcn_bandwidth or 1.0))
