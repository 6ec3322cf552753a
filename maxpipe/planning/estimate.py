"""Estimate the memory and the least time of a step from shapes alone.

The memory explains a compiler's figure and prices alternatives. The least time is what each part of
the machine would need if it did nothing else.

Letters: S stages, V repeats, M microbatches, D embed.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from maxpipe.config.catalog import ENGINES
from maxpipe.config.rules.batches import data_shards
from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip
from maxpipe.pipeline.engines.scheduled.plan import lockstep_plan
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.planning.footprint import (
    device_parameters,
    itemsize,
    layer_of,
    logits_bytes,
    microbatch_tokens,
    optimizer_bytes,
    residual_width,
    stash_width,
    working_width,
)

# Passes over weights and activations: forward, recomputation, gradients for inputs and for weights.
_PASSES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `activations` holds everything that grows with tokens."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        """Return the bytes of all parts."""
        return self.parameters + self.optimizer + self.gradients + self.activations


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, each as if the others were free.

    Attributes:
      compute: FLOPs at the chip's peak, bubble included: idle slots are computed masked.
      hbm: weights, optimizer state and activations through memory, counted from shapes.
      network: the slower of ICI and DCN; None if a needed bandwidth is unknown.
      mfu: model FLOPs utilisation of a step that takes as long as the largest of these.
    """

    compute: float
    hbm: float
    network: float | None
    mfu: float

    @property
    def step(self) -> float:
        """Return the least seconds of a step."""
        return max(self.compute, self.hbm, self.network or 0.0)


def estimate(config: Config) -> Memory:
    """Estimate the memory of one device for a resolved configuration on an SPMD engine."""
    pipeline = config.pipeline
    at_rest = _parameters(config)
    is_gathered = (
        config.mesh.size("fsdp") > 1
        and pipeline.fsdp_gather != "per_iteration"
        and ENGINES[pipeline.engine].has_stages
    )
    gathered = _parameters(config, ("fsdp",)) if is_gathered else 0.0
    return Memory(
        parameters=itemsize(config.model.param_dtype) * at_rest
        + itemsize(config.model.dtype) * gathered,
        optimizer=optimizer_bytes(config) * at_rest,
        gradients=4.0 * (gathered or at_rest),
        activations=_activations(config),
    )


def step_bounds(
    config: Config,
    chip: Chip,
    *,
    num_chips: int,
    flops: float,
    model_flops: float,
    memory: Memory,
    network: float | None,
) -> Bounds:
    """Bound the time of a compiled step from below.

    Args:
      config: resolved.
      chip: what it runs on.
      num_chips: chips of the mesh.
      flops: FLOPs of a step over all devices.
      model_flops: model FLOPs of a step.
      memory: estimate for one device.
      network: least seconds for the collectives of a step; None if unknown.
    """
    peak = chip.peak_flops[config.model.dtype]
    compute = flops / num_chips / peak
    hbm = traffic(config, memory) / chip.hbm_bandwidth
    step = max(compute, hbm, network or 0.0)
    return Bounds(compute, hbm, network, model_flops / num_chips / peak / step)


def traffic(config: Config, memory: Memory) -> float:
    """Return the least bytes that a device moves to and from its memory in a step."""
    size, count = itemsize(config.model.dtype), config.pipeline.num_microbatches
    # Every device multiplies with all weights of its stage, once a microbatch.
    weights = _PASSES * size * _parameters(config, ("fsdp",)) * count
    update = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    tokens = microbatch_tokens(config) * count
    width = 2 * layer_of(config).result_width  # written once, read once
    layers = config.model.stacked_layers / config.mesh.size("stage")
    return weights + update + _PASSES * size * tokens * layers * width


def _parameters(config: Config, whole_over: Collection[str] = ()) -> float:
    """Return the parameters on one device, gathered over some mesh axes."""
    layers = config.model.stacked_layers / config.mesh.size("stage")
    return (
        layers * device_parameters(config, "layers", whole_over=whole_over)
        + device_parameters(config, "embed", whole_over=whole_over)
        + device_parameters(config, "head", whole_over=whole_over)
    )


def _activations(config: Config) -> float:
    """Return the bytes that grow with tokens: what the engine stores, and one layer's work."""
    model, pipeline = config.model, config.pipeline
    layout, per_layer = build_layout(config), residual_width(config)
    layers, outside = layout.layers_per_stage, layout.num_outside * (model.embed_dim + per_layer)
    if model.first_dense_layers:
        dense = replace(config, model=model.dense)
        outside += model.first_dense_layers * (model.embed_dim + residual_width(dense))
    chunk_input, unit = float(model.embed_dim), model.embed_dim + layers * per_layer
    engine = ENGINES[pipeline.engine]
    if not engine.has_stages:
        stored = layers * (model.embed_dim + per_layer) + outside
    elif engine.lockstep:
        plan = lockstep_plan(build_table(config))
        slots = plan.sizes.activations + plan.sizes.gradients + 2
        stored = (plan.sizes.residuals + 1) * unit + slots * chunk_input
        if plan.splits_backward:
            stored += (plan.sizes.stash + 1) * layers * stash_width(config)
        # Layers outside the pipeline: a stage has its rows of one microbatch, within a tick.
        rows = config.data.global_batch_size // (pipeline.num_microbatches * data_shards(config))
        stored += outside * math.ceil(rows / num_stages(config)) / rows
    else:
        delay = 2 if pipeline.delay_activation_forwarding else 1
        stages, microbatches = num_stages(config), pipeline.num_microbatches
        iterations = microbatches * pipeline.num_repeats + delay * (stages - 1)
        # The conveyor of inputs and outputs, and its gradient.
        stored = iterations * unit + 2 * microbatches / stages * chunk_input
        # Each stage runs the layers outside the pipeline on its microbatches.
        stored += outside * microbatches / stages
    tokens = microbatch_tokens(config)
    # A lockstep engine divides the tokens of the head among all stages.
    head_shards = num_stages(config) if engine.lockstep else 1
    # One layer at a time is recomputed.
    columns = stored + working_width(config)
    return tokens * itemsize(model.dtype) * columns + logits_bytes(config, tokens / head_shards)
