"""Compute what the units of a block's candidates work with, besides what they keep."""

import numpy as np

from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.search.block import along
from maxpipe.plan.search.facts import Facts, LayerCosts
from maxpipe.plan.search.sizes import BlockSizes


def working_columns(sizes: BlockSizes, first_share: Number = 1.0) -> Number:
    """Return the width of a chunk's work, or of first dense layers' on a share of a microbatch.

    Where units are programs of their own, first dense layers are left out, see `first_excess`.
    """
    working: Number = _layer_work(sizes, sizes.layer)
    kept_results = np.minimum(sizes.layer.made, sizes.saving.residuals)
    if not sizes.engine.one_program:
        # The results are among what the chunk keeps or recomputes.
        by_layer = sizes.config.pipeline.remat_layers
        working = working - (kept_results if by_layer else sizes.layer.made)
    elif sizes.is_unrolled:
        # A loop copies a layer's residuals from its stack; an unrolled layer reads them in place.
        working = working - kept_results
    elif sizes.engine.has_stages:
        # What a backward holds but has not computed itself, it reads in its store.
        working = working + (sizes.layers - 1) * (sizes.saving.held - sizes.saving.residuals)
    if sizes.facts.of_first_layers is None or not sizes.engine.one_program:
        return working
    return np.maximum(working, first_share * _first_work(sizes.facts.of_first_layers, sizes))


def first_excess(sizes: BlockSizes) -> Number:
    """Return how many more bytes units of the first dense layers work with than other units."""
    if sizes.facts.of_first_layers is None:
        return 0.0
    more = _first_work(sizes.facts.of_first_layers, sizes) - working_columns(sizes)
    return sizes.tokens * sizes.itemsize * np.maximum(more, 0.0)


def _first_work(of_first_layers: Facts, sizes: BlockSizes) -> float:
    return _layer_work(sizes, of_first_layers.layer(sizes.block.grid.sizes))


def _layer_work(sizes: BlockSizes, layer: LayerCosts) -> float:
    """Return the width of what a layer's backward holds, with keys and values of all sequences."""
    return layer.working + 2 * (sizes.block.grid.size("context") - 1) * layer.key_values


def logits_work(sizes: BlockSizes, tokens: Number) -> Number:
    """Return the bytes of a tile of logits in float32 and of their gradient, for so many tokens."""
    columns = sizes.config.model.vocab_size / sizes.block.grid.size("tensor")
    of_tile = np.ceil(np.divide(tokens, along(sizes.block.tiles, "tiles")))
    return (FLOAT32 + sizes.itemsize) * of_tile * columns
