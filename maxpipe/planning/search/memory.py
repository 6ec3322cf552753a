"""Compute the memory of a block's candidates, by the forms that the estimate of one uses."""

from typing import NamedTuple

import numpy as np

from maxpipe.planning.footprint import itemsize
from maxpipe.planning.search.block import along
from maxpipe.planning.search.facts import LayerCosts
from maxpipe.planning.search.sizes import BlockSizes, state_per_parameter
from maxpipe.planning.stores import (
    Number,
    Store,
    Widths,
    circular_store,
    lockstep_store,
    sequential_store,
    stored_columns,
)
from maxpipe.planning.weights_held import Use, weights_held


class Working(NamedTuple):
    """Bytes that a device works with besides what it keeps.

    Attributes:
      unit: of the largest unit, without its residuals.
      head: of logits, loss and their gradients.
    """

    unit: Number
    head: Number


def memory_bytes(sizes: BlockSizes, working: Working | None = None) -> Number:
    """Return the bytes of a device, an array of the block's dimensions.

    Args:
      sizes: of the block.
      working: what a device works with, if it is known better than by `working_of`.
    """
    bytes_of = _program_bytes if sizes.engine.one_program else _stage_bytes
    return bytes_of(sizes, working or working_of(sizes))


def working_of(sizes: BlockSizes) -> Working:
    """Return what a device works with, by closed forms."""
    if not sizes.engine.one_program:
        return _stage_working(sizes)
    held = weights_held(sizes.engine, sizes.parameters.weights, _use(sizes))
    head_tokens = sizes.tokens / (sizes.stages if sizes.engine.lockstep else 1)
    share = _store(sizes).outside if sizes.engine.lockstep else 1.0
    return Working(
        sizes.tokens * sizes.itemsize * _working(sizes, share) + held.unit,
        _logits(sizes, head_tokens) + held.head,
    )


def _program_bytes(sizes: BlockSizes, working: Working) -> Number:
    """Return the same as `planning.estimate.estimate`, for many."""
    parameters = sizes.parameters
    held = weights_held(sizes.engine, parameters.weights, _use(sizes))
    state = state_per_parameter(sizes.config) * parameters.at_rest + held.copies + held.gradients
    kept = sizes.tokens * sizes.itemsize * kept_columns(sizes)
    return state + kept + np.maximum(working.unit, working.head)


def kept_columns(sizes: BlockSizes) -> Number:
    """Return the width of what one program keeps from forwards to backwards."""
    widths = Widths(sizes.config.model.embed_dim, sizes.residuals, sizes.stash)
    return stored_columns(
        _store(sizes), sizes.layers, sizes.outside, widths, sizes.itemsize, sizes.first_kept
    )


def _use(sizes: BlockSizes) -> Use:
    return Use(
        sizes.microbatches,
        sizes.repeats,
        sizes.layers,
        _delay(sizes) * sizes.stages,
        sizes.gathers("per_repeat"),
        sizes.gathers("once"),
        sizes.gathers_ahead(),
        sizes.splits_backward,
        sizes.itemsize,
        itemsize(sizes.config.model.param_dtype),
    )


def _delay(sizes: BlockSizes) -> int:
    return 2 if sizes.config.pipeline.delay_activation_forwarding else 1


def _store(sizes: BlockSizes) -> Store:
    if not sizes.engine.has_stages:
        return sequential_store(sizes.config.model.stacked_layers)
    if not sizes.engine.lockstep:
        by_autodiff = sizes.gathers("per_iteration")
        delay = _delay(sizes)
        return circular_store(sizes.stages, sizes.microbatches, sizes.repeats, delay, by_autodiff)
    residuals, arrivals, stash = map(sizes.of_pattern, ("residuals", "arrivals", "stash"))
    return lockstep_store(residuals, arrivals, stash, sizes.stages, np.floor(sizes.rows))


def _working(sizes: BlockSizes, first_share: Number = 1.0) -> Number:
    """Return the width of a chunk's work; of first dense layers, for so much of a microbatch."""
    others = sizes.block.grid.size("context") - 1

    def width(layer: LayerCosts) -> float:
        return layer.working + 2 * others * layer.key_values

    working: Number = width(sizes.layer)
    if sizes.engine.one_program and sizes.engine.has_stages:
        working = working + (sizes.layers - 1) * sizes.held
    if sizes.facts.of_first_layers is None:
        return working
    first = sizes.facts.of_first_layers.layer(sizes.block.grid.sizes)
    return np.maximum(working, first_share * width(first))


def _logits(sizes: BlockSizes, tokens: Number) -> Number:
    """Return the bytes of logits and their gradient, see `footprint.logits_bytes`."""
    tile = np.ceil(tokens / along(sizes.block.tiles, "tiles"))
    size = 4.0 + sizes.itemsize
    return size * tile * sizes.config.model.vocab_size / sizes.block.grid.size("tensor")


def _stage_bytes(sizes: BlockSizes, working: Working) -> Number:
    """Return the bytes of the first stage, which has most in flight, or of the last, if more.

    They follow `planning.stage_memory.StageMemory`, for chunks of equal size.
    """
    config, parameters = sizes.config, sizes.parameters
    embed, layers = config.model.embed_dim, sizes.layers
    of_stage = layers * sizes.repeats
    once = sizes.gathers("once") * (sizes.block.grid.size("fsdp") > 1)
    # The outer parameters of a stage are not split over the stages.
    outer = sizes.stages * parameters.outer_at_rest / 2
    if of_first := sizes.facts.of_first_layers:
        # All first dense layers lie on the first stage.
        first = of_first.parameters(sizes.block.grid.sizes).layer_at_rest
        outer = outer + sizes.num_first * first / 2
    at_rest = of_stage * parameters.layer_at_rest + outer
    copies = of_stage * parameters.layer_gathered + max(
        parameters.embed_gathered, parameters.head_gathered
    )
    state = at_rest * state_per_parameter(config) + np.where(
        once > 0, copies * (sizes.itemsize + 4.0), at_rest * 4.0
    )
    unit = embed + layers * sizes.residuals
    handed = embed + layers * sizes.handed_over
    columns = sizes.of_pattern("residuals") * unit + sizes.of_pattern("stash") * handed
    columns += sizes.of_pattern("arrivals") * embed
    # Of the first stage's units, those of its first chunk run the first dense layers, too.
    columns += sizes.of_pattern("residuals") / sizes.repeats * sizes.first_kept
    kept = sizes.tokens * sizes.itemsize * columns
    return state + kept + working.unit + working.head / sizes.stages


def _stage_working(sizes: BlockSizes) -> Working:
    """Return what the units of a stage work with, with the weights that they gather."""
    layers = sizes.layers
    once = sizes.gathers("once") * (sizes.block.grid.size("fsdp") > 1)
    recomputed = np.maximum(sizes.layer.results - sizes.residuals, 0.0)
    if sizes.config.pipeline.remat_layers:
        recomputed = sizes.config.model.embed_dim + sizes.offloaded
    columns = _working(sizes) + layers * (recomputed + sizes.offloaded)
    gathered = (1.0 - once) * layers * sizes.parameters.layer_gathered * sizes.itemsize
    return Working(sizes.tokens * sizes.itemsize * columns + gathered, _logits(sizes, sizes.tokens))
