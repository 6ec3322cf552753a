"""Estimate the memory and the least time of a step from shapes alone.

The memory explains a compiler's figure and prices alternatives. The least time of a step is given
for each part of the machine, as if the others were free.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from dataclasses import dataclass
from typing import NamedTuple

from maxpipe.config.catalog import ENGINES
from maxpipe.config.rules.batches import data_shards
from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip, Tpu
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.pipeline.engines.scheduled.plan import lockstep_plan
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.plan.footprint import (
    device_parameters,
    first_layers_width,
    held_width,
    is_unrolled,
    itemsize,
    keeps_gathered,
    layer_of,
    logits_bytes,
    made_width,
    microbatch_tokens,
    on_platform,
    optimizer_bytes,
    residual_width,
    stash_width,
    total_parameters,
    weights_of,
    with_dense_layers,
    working_width,
)
from maxpipe.plan.prefetch import gathers_in_steps
from maxpipe.plan.stores import (
    Widths,
    circular_store,
    lockstep_store,
    sequential_store,
    stored_columns,
)
from maxpipe.plan.weights_held import Use, weights_held

# Passes over weights and activations: forward, gradients for inputs and for weights.
_PASSES = 3


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters, optimizer: parameters and optimizer state at rest.
      gradients: sums of gradients, whole where they are scattered once a step.
      activations: everything that grows with tokens, less what gradients replace.
      in_use: copies of weights for computation, and their gradients before these are added to the
        sums.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    in_use: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of all parts."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.in_use


@dataclass(frozen=True)
class Bounds:
    """Least seconds of a step, each as if the others were free.

    Attributes:
      compute: time of the FLOPs at the chip's peak, masked idle slots of the bubble included.
      hbm: time to move weights, optimizer state and activations through memory, from shapes.
      network: time of the slower of ICI and DCN; None if a needed bandwidth is unknown.
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


def estimate(config: Config, tpu: Tpu | None) -> Memory:
    """Estimate the memory of one device for a resolved configuration on an SPMD engine.

    Args:
      config: the resolved configuration.
      tpu: the device's chip; None if it is not a TPU or an unknown one. Weights are
        gathered in steps on TPUs.
    """
    if tpu is not None:
        config = on_platform(config, "tpu")
    weights, use = weights_of(config), _use(config, tpu)
    trained = weights_of(config, only_trained=True)
    held = weights_held(ENGINES[config.pipeline.engine], weights, use, trained)
    copies, gradients, late, unit, head = map(float, held)
    moments = _moments(config, on_tpus=tpu is not None)
    # Late gradients take the place of residuals.
    kept = max(moments.kept - late, 0.0)
    # The head has done its work before the backward of a layer begins.
    layers_are_more = moments.unit + unit >= moments.head + head
    return Memory(
        parameters=use.stored * float(weights.stored),
        optimizer=optimizer_bytes(config) * float(trained.stored),
        gradients=gradients,
        activations=kept + (moments.unit if layers_are_more else moments.head),
        in_use=copies + (unit if layers_are_more else head),
    )


def _use(config: Config, tpu: Tpu | None) -> Use:
    pipeline = config.pipeline
    return Use(
        microbatches=pipeline.num_microbatches,
        repeats=pipeline.num_repeats,
        layers=build_layout(config).layers_per_stage,
        period=pipeline.forwarding_delay * num_stages(config),
        per_repeat=float(pipeline.fsdp_gather == "per_repeat"),
        once=float(pipeline.fsdp_gather == "once"),
        in_steps=float(gathers_in_steps(config, tpu)),
        size=itemsize(config.model.dtype),
        stored=itemsize(config.model.param_dtype),
        keeps_gathered=float(keeps_gathered(pipeline)),
        unrolled=float(is_unrolled(pipeline)),
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
      config: the resolved configuration.
      chip: the chip that it runs on.
      num_chips: number of chips in the mesh.
      flops: FLOPs of a step over all devices.
      model_flops: model FLOPs of a step.
      memory: estimated memory of one device.
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


class _Moments(NamedTuple):
    """Bytes that grow with tokens: kept from forward to backward, and used by a unit or head."""

    kept: float
    unit: float
    head: float


def _moments(config: Config, *, on_tpus: bool) -> _Moments:
    model, pipeline = config.model, config.pipeline
    layout, engine, stages = build_layout(config), ENGINES[pipeline.engine], num_stages(config)
    widths = Widths(model.embed_dim, residual_width(config), stash_width(config))
    rows = config.data.global_batch_size // (pipeline.num_microbatches * data_shards(config))
    if not engine.has_stages:
        stored = sequential_store(model.stacked_layers)
    elif engine.lockstep:
        sizes = lockstep_plan(build_table(config)).sizes
        stored = lockstep_store(
            sizes.residuals, sizes.activations + sizes.gradients, sizes.stash, stages, rows
        )
    else:
        microbatches, repeats = pipeline.num_microbatches, pipeline.num_repeats
        by_autodiff = not pipeline.gathers_whole
        delay = pipeline.forwarding_delay
        stored = circular_store(stages, microbatches, repeats, delay, by_autodiff)
    first, size = first_layers_width(config), itemsize(model.dtype)
    layers, outside = layout.layers_per_stage, layout.num_outside
    columns = stored_columns(stored, layers, outside, widths, size, first)
    tokens = microbatch_tokens(config)
    # A lockstep engine divides the tokens of the head among all stages.
    head_shards = stages if engine.lockstep else 1
    others = layers - 1 if engine.has_stages else 0
    # What a backward holds but has not computed itself, it reads in its store.
    working = working_width(config, on_tpus=on_tpus)
    working += others * (held_width(config) - residual_width(config))
    if is_unrolled(pipeline):
        # A loop copies a layer's residuals from its stack; an unrolled layer reads them in place.
        working -= min(made_width(config), residual_width(config))
    if model.first_dense_layers:
        share = stored.outside if engine.lockstep else 1.0  # part of a microbatch's rows
        first_working = working_width(with_dense_layers(config), on_tpus=on_tpus)
        working = max(working, float(share) * first_working)
    column = tokens * size
    return _Moments(
        column * float(columns), column * working, logits_bytes(config, tokens / head_shards)
    )
