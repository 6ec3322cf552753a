"""Compute the weights and gradients that an engine holds besides those at rest, in bytes.

Letters: S stages, V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.footprint import itemsize
from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.search.block import BlockSizes


class Held(NamedTuple):
    """Bytes on one device.

    Attributes:
      copies: copies of weights, all step long.
      gradients: sums of gradients, all step long, and gradients that wait to be added.
      late: the part of `gradients` that layers make one by one while their residuals are freed.
      unit: what a unit makes of weights, and their gradients, while it computes.
      head: the same for the head.
    """

    copies: Number
    gradients: Number
    late: Number
    unit: Number
    head: Number


def weights_held(sizes: BlockSizes) -> Held:
    """Return what an engine of one program holds besides parameters and optimizer at rest."""
    if not sizes.engine.has_stages:
        return _sequential(sizes)
    return _lockstep(sizes) if sizes.engine.lockstep else _circular(sizes)


def _sequential(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    # A microbatch's gradients wait until all are computed, and are then added.
    several, stored = np.greater(sizes.microbatches, 1), itemsize(sizes.config.model.param_dtype)
    whole = weights.layers_gathered - weights.layers_at_rest
    # A loop over layers allocates all gradients at its start.
    late = sizes.is_unrolled * np.where(several, stored, FLOAT32) * trained.layers_at_rest
    return Held(
        copies=_cast_layers(sizes) + sizes.keeps_gathered * size * whole,
        gradients=(FLOAT32 + stored * several) * trained.at_rest,
        late=late,
        # A layer and its gradient.
        unit=size * (weights.of.layer_gathered + trained.of.layer_gathered),
        head=size * (weights.of.projection + trained.of.projection),
    )


def _cast_layers(sizes: BlockSizes) -> Number:
    """Return the bytes of all layers of chunks in the dtype of activations.

    XLA casts them before the loop over layers or iterations.
    """
    is_cast = sizes.itemsize < itemsize(sizes.config.model.param_dtype)
    return is_cast * sizes.itemsize * sizes.weights.layers_at_rest


def _lockstep(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    of, of_trained = weights.of, trained.of
    stored = itemsize(sizes.config.model.param_dtype)
    once, in_steps = sizes.gathers("once"), sizes.gathers_in_steps()
    each = 1.0 - once  # per iteration; the engine has no repeats to gather for
    chunk = sizes.layers * of.layer_gathered
    # Weights that are whole are cast before the loop, all layers at once.
    is_whole = float(of.layer_gathered == of.layer_at_rest and size < stored)
    whole = of_trained.layer_gathered * (of_trained.layer_gathered > of_trained.layer_at_rest)
    gradients = each * (1.0 - in_steps) * (sizes.layers * of_trained.layer_at_rest + whole)
    gradients += once * sizes.layers * of_trained.layer_gathered
    # Gradients of layers outside the pipeline come all at once.
    outside = once * trained.outside_gathered
    outside += each * (trained.outside_at_rest + whole) * np.greater(trained.outside_at_rest, 0)
    gradients = np.maximum(gradients, outside)
    # In mode `once` the head and the sum of its gradients are whole, too; the embedding is not.
    embedding = of_trained.ends_at_rest - of_trained.shared_at_rest
    whole_sums = trained.layers_gathered + of_trained.shared + trained.outside_gathered + embedding
    # In steps the gradients of all layers of a chunk are whole, in the dtype of activations.
    whole_chunk = in_steps * sizes.layers * of_trained.layer_gathered
    gathered = weights.layers_gathered + of.shared + weights.outside_gathered
    return Held(
        # If weights are gathered in steps, XLA casts all shards before the loop, too.
        copies=np.maximum(in_steps, each * is_whole) * _cast_layers(sizes)
        + once * size * gathered
        # Layers outside the pipeline are laid out for use.
        + stored * weights.outside_at_rest,
        gradients=FLOAT32 * (each * trained.at_rest + once * whole_sums),
        late=0.0,
        unit=each * (1.0 - is_whole) * size * (chunk + whole_chunk) + FLOAT32 * gradients,
        head=each * size * of.projection + FLOAT32 * of_trained.projection,
    )


def _circular(sizes: BlockSizes) -> Held:
    weights, trained, size = sizes.weights, sizes.trained_weights, sizes.itemsize
    once, per_repeat = sizes.gathers("once"), sizes.gathers("per_repeat")
    each = 1.0 - per_repeat - once
    chunk = sizes.layers * weights.of.layer_gathered
    # A repeat's weights are gathered during the one before, or the one before that.
    fewest = sizes.config.pipeline.forwarding_delay * sizes.stages  # microbatches of a conveyor
    lookahead = 1.0 + np.equal(sizes.microbatches, fewest)
    sets = np.minimum(sizes.repeats, lookahead + 1.0) * per_repeat
    sums = np.minimum(sizes.repeats, 2.0) * per_repeat
    # The sums of the repeats at work, two at a switch, become gradients at rest when they are done.
    done = trained.at_rest - sums * trained.layers_at_rest / sizes.repeats
    whole = sizes.layers * sums * trained.of.layer_gathered + once * trained.over_fsdp
    # Layers outside the pipeline are gathered one by one, and have gradients at rest in any mode.
    rows = trained.in_rows - (1.0 - once) * trained.outside_at_rest
    is_outside = np.greater(weights.outside_at_rest, 0)
    at_once = np.maximum(each * chunk, is_outside * weights.of.layer_gathered)
    return Held(
        copies=each * _cast_layers(sizes)
        + size * (sets * chunk + once * weights.over_fsdp)
        # Gradients of the projection: the logits of all microbatches are made at once.
        + size * trained.of.projection
        + itemsize(sizes.config.model.param_dtype) * weights.outside_at_rest,
        gradients=FLOAT32 * ((1.0 - once) * done + whole + rows),
        late=0.0,
        # A chunk's weights, or those of a layer outside, and a layer's gradient before it is added.
        unit=size * (at_once + trained.of.layer_gathered),
        head=size * weights.of.projection,
    )
