"""Compute the weights and gradients that an engine holds besides those at rest, in bytes.

Every number may be an array with an entry for each of many candidates.

Letters: S stages, V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.config.engine_facts import Engine
from maxpipe.planning.stores import FLOAT32, Number


class ParameterCounts(NamedTuple):
    """Parameters on one device, as numbers of values.

    Attributes:
      at_rest: all of them.
      layers_at_rest: those of all layers.
      gathered: all of them, whole over fsdp.
      layer_at_rest, layer_gathered: those of a layer, the second whole over all storage axes.
      projection: those that make logits, whole over all storage axes.
      shared_at_rest, shared: those of the head and of first dense layers, which the stages of a
        lockstep engine share; the second whole over all storage axes.
    """

    at_rest: Number
    layers_at_rest: Number
    gathered: Number
    layer_at_rest: Number
    layer_gathered: Number
    projection: Number
    shared_at_rest: Number
    shared: Number

    @property
    def layers_gathered(self) -> Number:
        """Return those of all layers, whole over all storage axes."""
        return self.layers_at_rest * self.layer_gathered / self.layer_at_rest


class Use(NamedTuple):
    """How an engine uses weights.

    Attributes:
      microbatches, repeats, layers: M, V, and layers of a chunk.
      period: the fewest microbatches that a conveyor holds, S or twice that.
      per_repeat, once: 1 where weights are gathered so often, else 0.
      in_steps: 1 where they are gathered in steps, else 0.
      size, stored: bytes of a value that is computed with, and at rest.
      keeps_gathered: 1 where the backward of layers without stages reads the weights that their
        forward has gathered, else 0.
      unrolled: 1 where each layer without stages is compiled by itself, else 0.
    """

    microbatches: Number
    repeats: Number
    layers: Number
    period: float
    per_repeat: Number
    once: Number
    in_steps: Number
    size: float
    stored: float
    keeps_gathered: Number
    unrolled: Number


class Held(NamedTuple):
    """Bytes on one device.

    Attributes:
      copies: of weights, all step long.
      gradients: sums, all step long, and those that wait to be added.
      late: the part of `gradients` that layers make one by one while their residuals are freed.
      unit: what a unit makes of weights, and their gradients, while it computes.
      head: the same of the head.
    """

    copies: Number
    gradients: Number
    late: Number
    unit: Number
    head: Number


def weights_held(
    engine: Engine, weights: ParameterCounts, use: Use, trained: ParameterCounts | None = None
) -> Held:
    """Return what an engine of one program holds besides parameters and optimizer at rest.

    Args:
      engine: the facts.
      weights: all parameters.
      use: how the engine uses them.
      trained: those of them that have a gradient; None if all have.
    """
    trained = weights if trained is None else trained
    if not engine.has_stages:
        return _sequential(weights, trained, use)
    compute = _lockstep if engine.lockstep else _circular
    return compute(weights, trained, use)


def _sequential(weights: ParameterCounts, trained: ParameterCounts, use: Use) -> Held:
    # Gradients of a microbatch wait until all are there, and are added then.
    several = np.greater(use.microbatches, 1)
    waiting = use.stored * trained.at_rest * several
    whole = weights.layers_gathered - weights.layers_at_rest
    # A loop over layers has room for all gradients from its start.
    late = use.unrolled * np.where(several, use.stored, FLOAT32) * trained.layers_at_rest
    return Held(
        _cast_layers(weights, use) + use.keeps_gathered * use.size * whole,
        FLOAT32 * trained.at_rest + waiting,
        late,
        # A layer and its gradient.
        use.size * (weights.layer_gathered + trained.layer_gathered),
        use.size * (weights.projection + trained.projection),
    )


def _cast_layers(weights: ParameterCounts, use: Use) -> Number:
    """Return the bytes of all layers in the dtype of activations.

    XLA casts them before the loop over layers or iterations.
    """
    return use.size * weights.layers_at_rest if use.size < use.stored else 0.0


def _lockstep(weights: ParameterCounts, trained: ParameterCounts, use: Use) -> Held:
    each = 1.0 - use.per_repeat - use.once  # per iteration; the engine has no repeats to gather for
    chunk = use.layers * weights.layer_gathered
    # Weights that are whole are cast before the loop, all layers at once.
    is_whole = np.equal(weights.layer_gathered, weights.layer_at_rest) * (use.size < use.stored)
    whole = np.greater(trained.layer_gathered, trained.layer_at_rest) * trained.layer_gathered
    gradients = each * (1.0 - use.in_steps) * (use.layers * trained.layer_at_rest + whole)
    gradients += use.once * use.layers * trained.layer_gathered
    # Once a step the head is whole, too, and the sum of its gradients; the embedding is not.
    embedding = trained.at_rest - trained.layers_at_rest - trained.shared_at_rest
    whole_sums = trained.layers_gathered + trained.shared + embedding
    # In steps those of all layers are there whole, in the dtype of activations.
    whole_chunk = use.in_steps * use.layers * trained.layer_gathered
    return Held(
        # Of what is gathered in steps XLA casts all shards before the loop, too.
        np.maximum(use.in_steps, each * is_whole) * _cast_layers(weights, use)
        + use.once * use.size * (weights.layers_gathered + weights.shared),
        FLOAT32 * (each * trained.at_rest + use.once * whole_sums),
        0.0,
        each * (1.0 - is_whole) * use.size * (chunk + whole_chunk) + FLOAT32 * gradients,
        each * use.size * weights.projection + FLOAT32 * trained.projection,
    )


def _circular(weights: ParameterCounts, trained: ParameterCounts, use: Use) -> Held:
    each = 1.0 - use.per_repeat - use.once
    chunk = use.layers * weights.layer_gathered
    # A repeat's weights are gathered during the one before, or the one before that.
    lookahead = 1.0 + np.equal(use.microbatches, use.period)
    sets = np.minimum(use.repeats, lookahead + 1.0) * use.per_repeat
    sums = np.minimum(use.repeats, 2.0) * use.per_repeat
    # The sums of the repeats at work, two at a switch, become gradients at rest when they are done.
    done = trained.at_rest - sums * trained.layers_at_rest / use.repeats
    whole = use.layers * sums * trained.layer_gathered + use.once * trained.gathered
    return Held(
        each * _cast_layers(weights, use)
        + use.size * (sets * chunk + use.once * weights.gathered)
        # Of the logits of all microbatches, which are made at once.
        + use.size * trained.projection,
        FLOAT32 * ((1.0 - use.once) * done + whole),
        0.0,
        # A chunk's weights, and a layer's gradient before it is added.
        use.size * (each * chunk + trained.layer_gathered),
        use.size * weights.projection,
    )
