"""Compute the memory of a device, for the candidates of a block or for one configuration."""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.footprint import itemsize, optimizer_bytes
from maxpipe.plan.number import Number
from maxpipe.plan.search.mpmd_memory import fullest_stage
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.working import logits_work, working_columns
from maxpipe.plan.weights_held import Use, weights_held


class ProgramMemory(NamedTuple):
    """Bytes on one device, by the parts that `plan.estimate.Memory` names."""

    parameters: Number
    optimizer: Number
    gradients: Number
    activations: Number
    in_use: Number


def memory_bytes(sizes: BlockSizes) -> Number:
    """Return the bytes of a device, or of one of the fullest stage where stages are programs."""
    if sizes.engine.one_program:
        return sum(program_memory(sizes), 0.0)
    return fullest_stage(sizes)


def program_memory(sizes: BlockSizes) -> ProgramMemory:
    """Return the memory of a device where one program runs all stages, or there are none."""
    config, column = sizes.config, sizes.tokens * sizes.itemsize
    held = weights_held(sizes.engine, sizes.weights, _use(sizes), sizes.trained_weights)
    # Stages of a lockstep engine divide layers outside the pipeline, and the head.
    share = sizes.lockstep_share() if sizes.engine.lockstep else 1.0
    head_tokens = sizes.tokens / (sizes.stages if sizes.engine.lockstep else 1)
    unit, head = column * working_columns(sizes, share), logits_work(sizes, head_tokens)
    # The head has done its work before the backward of a layer begins.
    layers_are_more = unit + held.unit >= head + held.head
    # Late gradients take the place of residuals.
    kept = np.maximum(column * kept_columns(sizes) - held.late, 0.0)
    return ProgramMemory(
        parameters=itemsize(config.model.param_dtype) * sizes.weights.stored,
        optimizer=optimizer_bytes(config) * sizes.trained_weights.stored,
        gradients=held.gradients,
        activations=kept + np.where(layers_are_more, unit, head),
        in_use=held.copies + np.where(layers_are_more, held.unit, held.head),
    )


def kept_columns(sizes: BlockSizes) -> Number:
    """Return the width of what one program keeps from forwards to backwards."""
    store, embed = _store(sizes), sizes.config.model.embed_dim
    # Without stages a unit is a layer.
    layers: Number = sizes.layers if sizes.engine.has_stages else 1.0
    outside: Number = sizes.outside if sizes.engine.has_stages else 0.0
    unit = embed + layers * sizes.saving.residuals
    of_outside = outside * (embed + sizes.saving.residuals) + sizes.saving.first_kept
    return (
        store.units * unit
        + store.inputs * embed
        + store.stashes * layers * sizes.saving.stash
        + store.masks * embed / sizes.itemsize
        + store.outside * of_outside
    )


def _use(sizes: BlockSizes) -> Use:
    return Use(
        microbatches=sizes.microbatches,
        repeats=sizes.repeats,
        layers=sizes.layers,
        period=sizes.config.pipeline.forwarding_delay * sizes.stages,
        per_repeat=sizes.gathers("per_repeat"),
        once=sizes.gathers("once"),
        in_steps=sizes.gathers_in_steps(),
        size=sizes.itemsize,
        stored=itemsize(sizes.config.model.param_dtype),
        keeps_gathered=sizes.keeps_gathered,
        unrolled=float(sizes.is_unrolled),
    )


class _Store(NamedTuple):
    """What is kept at the fullest moment.

    Attributes:
      units: chunks whose residuals are kept; layers where there are no chunks.
      inputs: activations or gradients that wait for a unit.
      stashes: chunks between their I and their W.
      outside: microbatches whose residuals are kept by layers outside the pipeline and by first
        dense layers.
      masks: activations for which a mask of one byte per value is kept.
    """

    units: Number
    inputs: Number = 0.0
    stashes: Number = 0.0
    outside: Number = 1.0
    masks: Number = 0.0


def _store(sizes: BlockSizes) -> _Store:
    if not sizes.engine.has_stages:
        return _Store(sizes.config.model.stacked_layers)
    if sizes.engine.lockstep:
        residuals, arrivals, stash = map(sizes.of_pattern, ("residuals", "arrivals", "stash"))
        # Each store has a slot more, for scratch: two for activations and gradients.
        stashes = stash + np.greater(stash, 0)
        return _Store(residuals + 1, arrivals + 2, stashes, sizes.lockstep_share())
    delay = sizes.config.pipeline.forwarding_delay
    iterations = sizes.microbatches * sizes.repeats + delay * (sizes.stages - 1)
    # The circular engine keeps a unit of every iteration, and the conveyor of inputs and outputs
    # with its gradient. Each stage runs the layers outside the pipeline on its microbatches.
    # Autodiff keeps the masks that choose each iteration's input and output.
    of_stage = sizes.microbatches / sizes.stages
    masks = 2 * iterations * sizes.gathers("per_iteration")
    return _Store(iterations, 2 * of_stage, outside=of_stage, masks=masks)
