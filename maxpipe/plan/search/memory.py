"""Compute the memory of a device, for the candidates of a block or for one configuration."""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.footprint import itemsize, optimizer_bytes
from maxpipe.plan.search.mpmd_memory import fullest_stage
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.working import logits_work, working_columns
from maxpipe.plan.stores import (
    Number,
    Store,
    Widths,
    circular_store,
    lockstep_store,
    sequential_store,
    stored_columns,
)
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
    share = _store(sizes).outside if sizes.engine.lockstep else 1.0
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
    widths = Widths(sizes.config.model.embed_dim, sizes.saving.residuals, sizes.saving.stash)
    return stored_columns(
        _store(sizes), sizes.layers, sizes.outside, widths, sizes.itemsize, sizes.saving.first_kept
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


def _store(sizes: BlockSizes) -> Store:
    if not sizes.engine.has_stages:
        return sequential_store(sizes.config.model.stacked_layers)
    if not sizes.engine.lockstep:
        by_autodiff = sizes.gathers("per_iteration")
        counts = sizes.stages, sizes.microbatches, sizes.repeats
        delay = sizes.config.pipeline.forwarding_delay
        return circular_store(*counts, delay, by_autodiff)
    residuals, arrivals, stash = map(sizes.of_pattern, ("residuals", "arrivals", "stash"))
    return lockstep_store(residuals, arrivals, stash, sizes.stages, np.floor(sizes.rows))
