"""Estimate the memory and the least time of a step from shapes alone.

The memory explains a compiler's figure and prices alternatives. The least time of a step is given
for each part of the machine, as if the others were free.
"""

from dataclasses import dataclass

from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip, Tpu
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.plan.device_parameters import device_parameters, total_parameters, with_dense_layers
from maxpipe.plan.footprint import itemsize, layer_of, microbatch_tokens
from maxpipe.plan.search.block import sizes_of_configuration
from maxpipe.plan.search.memory import Memory, program_memory

# Passes over weights and activations: forward, gradients for inputs and for weights.
_PASSES = 3


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, each as if the others were free."""

    compute: float  # with masked idle slots of the bubble
    hbm: float
    network: float | None  # the slower of ICI and DCN; None if a needed bandwidth is unknown
    mfu: float  # model FLOPs utilisation of a step that takes as long as the largest of these

    @property
    def step(self) -> float:
        return max(self.compute, self.hbm, self.network or 0.0)


def estimate(config: Config, tpu: Tpu | None) -> Memory[float]:
    """Estimate the memory of one device for a resolved configuration on an SPMD engine.

    `tpu` is None if the device is not a TPU or an unknown one; TPUs gather weights in steps.
    """
    return program_memory(sizes_of_configuration(config, tpu, on_tpus=tpu is not None)).single()


def step_bounds(
    config: Config,
    chip: Chip,
    *,
    num_chips: int,
    flops: float,
    model_flops: float,
    memory: Memory[float],
    network: float | None,
) -> Bounds:
    """Bound the time of a compiled step from below.

    Args:
      flops, model_flops: of a step over all devices.
      memory: estimated memory of one device.
      network: least seconds for the collectives of a step; None if unknown.
    """
    peak = chip.peak_flops[config.model.dtype]
    compute = flops / num_chips / peak
    hbm = traffic(config, memory) / chip.hbm_bandwidth
    step = max(compute, hbm, network or 0.0)
    return Bounds(compute, hbm, network, model_flops / num_chips / peak / step)


def traffic(config: Config, memory: Memory[float]) -> float:
    """Return the least bytes that a device moves to and from its memory in a step."""
    size, count = itemsize(config.model.dtype), config.pipeline.num_microbatches
    # Unless nothing is saved, the backward may recompute without products; frozen weights have no
    # gradients.
    passes = _PASSES - 1 + remat_policy(config.pipeline).saves_nothing
    read, trained = _multiplied(config), _multiplied(config, only_trained=True)
    weights = size * (passes * read + trained) * count
    passes += not config.model.lora.rank
    update = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    tokens = microbatch_tokens(config) * count
    width = 2 * layer_of(config).result_width  # written once, read once
    widths = config.model.stacked_layers * width
    if first := config.model.first_dense_layers:
        widths += first * 2 * layer_of(with_dense_layers(config)).result_width
    # Layers outside the pipeline are divided among the stages, too.
    return weights + update + passes * size * tokens * widths / config.mesh.size("stage")


def _multiplied(config: Config, *, only_trained: bool = False) -> float:
    """Return the parameters that a device multiplies with in a microbatch: all of its stage's.

    The embedding table is only looked up, unless it is the head's as well.
    """
    total = total_parameters(config, ("fsdp",), only_trained=only_trained)
    if config.model.tie_embeddings:
        return total
    # The part "embed" also holds the first dense layers, which are multiplied with.
    table = with_dense_layers(config)
    return total - device_parameters(
        table, "embed", whole_over=("fsdp",), only_trained=only_trained
    )
