"""Compute the memory of a block's candidates, by the forms that a single estimate uses."""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.footprint import itemsize
from maxpipe.plan.search.block import along
from maxpipe.plan.search.facts import Facts, LayerCosts
from maxpipe.plan.search.sizes import BlockSizes, state_per_parameter
from maxpipe.plan.search.stages import stage_bytes
from maxpipe.plan.stores import (
    Number,
    Store,
    Widths,
    circular_store,
    lockstep_store,
    sequential_store,
    stored_columns,
    tile_bytes,
)
from maxpipe.plan.weights_held import Use, weights_held


class Working(NamedTuple):
    """Bytes that a device works with besides what it keeps.

    Attributes:
      unit: bytes of the largest unit, without its residuals.
      head: bytes of logits, loss and their gradients.
    """

    unit: Number
    head: Number


def memory_bytes(sizes: BlockSizes) -> Number:
    """Return the bytes of a device, an array of the block's dimensions."""
    working = _working_of(sizes)
    if sizes.engine.one_program:
        return _program_bytes(sizes, working)
    return stage_bytes(sizes, working.unit, working.head, _first_excess(sizes))


def _working_of(sizes: BlockSizes) -> Working:
    """Return what a device works with, by closed forms."""
    if not sizes.engine.one_program:
        return _stage_working(sizes)
    held = weights_held(sizes.engine, sizes.weights, _use(sizes))
    head_tokens = sizes.tokens / (sizes.stages if sizes.engine.lockstep else 1)
    share = _store(sizes).outside if sizes.engine.lockstep else 1.0
    return Working(
        sizes.tokens * sizes.itemsize * _working(sizes, share) + held.unit,
        _logits(sizes, head_tokens) + held.head,
    )


def _program_bytes(sizes: BlockSizes, working: Working) -> Number:
    """Return the bytes of a device where one program runs all stages, or there are none.

    The result is that of `planning.estimate.estimate`.
    """
    weights = sizes.weights
    held = weights_held(sizes.engine, weights, _use(sizes))
    state = state_per_parameter(sizes.config) * weights.stored + held.copies + held.gradients
    kept = sizes.tokens * sizes.itemsize * kept_columns(sizes)
    # Late gradients take the place of residuals.
    return state + np.maximum(kept - held.late, 0.0) + np.maximum(working.unit, working.head)


def kept_columns(sizes: BlockSizes) -> Number:
    """Return the width of what one program keeps from forwards to backwards."""
    widths = Widths(sizes.config.model.embed_dim, sizes.residuals, sizes.stash)
    return stored_columns(
        _store(sizes), sizes.layers, sizes.outside, widths, sizes.itemsize, sizes.first_kept
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


def _working(sizes: BlockSizes, first_share: Number = 1.0) -> Number:
    """Return the width of a chunk's work, or of first dense layers' on a share of a microbatch.

    Where units are programs of their own, first dense layers are left out, see `_first_excess`.
    """
    working: Number = _layer_work(sizes, sizes.layer)
    kept_results = np.minimum(sizes.layer.made, sizes.residuals)
    if not sizes.engine.one_program:
        # The results are among what the chunk keeps or recomputes.
        by_layer = sizes.config.pipeline.remat_layers
        working = working - (kept_results if by_layer else sizes.layer.made)
    elif sizes.is_unrolled:
        # A loop copies a layer's residuals from its stack; an unrolled layer reads them in place.
        working = working - kept_results
    elif sizes.engine.has_stages:
        # What a backward holds but has not computed itself, it reads in its store.
        working = working + (sizes.layers - 1) * (sizes.held - sizes.residuals)
    if sizes.facts.of_first_layers is None or not sizes.engine.one_program:
        return working
    return np.maximum(working, first_share * _first_work(sizes.facts.of_first_layers, sizes))


def _first_excess(sizes: BlockSizes) -> Number:
    """Return how many more bytes units of the first dense layers work with than other units."""
    if sizes.facts.of_first_layers is None:
        return 0.0
    more = _first_work(sizes.facts.of_first_layers, sizes) - _working(sizes)
    return sizes.tokens * sizes.itemsize * np.maximum(more, 0.0)


def _first_work(of_first_layers: Facts, sizes: BlockSizes) -> float:
    return _layer_work(sizes, of_first_layers.layer(sizes.block.grid.sizes))


def _layer_work(sizes: BlockSizes, layer: LayerCosts) -> float:
    """Return the width of what a layer's backward holds, with keys and values of all sequences."""
    return layer.working + 2 * (sizes.block.grid.size("context") - 1) * layer.key_values


def _logits(sizes: BlockSizes, tokens: Number) -> Number:
    """Return the bytes of logits and their gradient, see `footprint.logits_bytes`."""
    columns = sizes.config.model.vocab_size / sizes.block.grid.size("tensor")
    return tile_bytes(tokens, along(sizes.block.tiles, "tiles"), columns, sizes.itemsize)


def _stage_working(sizes: BlockSizes) -> Working:
    """Return what the units of a stage work with, with the weights that they gather."""
    layers = sizes.layers
    recomputed = np.maximum(sizes.layer.made - sizes.residuals, 0.0)
    if (pipeline := sizes.config.pipeline).remat_layers:
        # Without `remat_iterations` the inputs of layers are residuals.
        recomputed = pipeline.remat_iterations * sizes.config.model.embed_dim + sizes.offloaded
    columns = _working(sizes) + layers * (recomputed + sizes.offloaded)
    each_time = (sizes.block.grid.size("fsdp") > 1) * (1.0 - sizes.gathers_once)
    values = sizes.tokens * columns + each_time * layers * sizes.parameters.layer_gathered
    return Working(sizes.itemsize * values, _logits(sizes, sizes.tokens))
