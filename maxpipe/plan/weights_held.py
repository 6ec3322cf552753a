"""Compute the weights and gradients that an engine holds besides those at rest, in bytes.

Every number may be an array with an entry for each of many candidates.

Letters: S stages, V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.config.engine_facts import Engine
from maxpipe.plan.number import FLOAT32, Number


class ParameterCounts(NamedTuple):
    """Parameters on one device, as numbers of values.

    Attributes:
      stored: all parameters, with the rows of layers outside the pipeline and their padding.
      at_rest: all parameters, layers outside the pipeline split by their dimensions, as for use.
      layers_at_rest: parameters of all layers of chunks.
      gathered: parameters of chunks and of embedding and head, whole over fsdp.
      layer_at_rest, layer_gathered: parameters of a layer, the second whole over all storage axes.
      projection: parameters that make logits, whole over all storage axes.
      shared_at_rest, shared: those of the head, of first dense layers and of layers outside the
        pipeline, which the stages of a lockstep engine share; the second whole over all storage
        axes.
      outside_at_rest, outside: the part of the shared ones in layers outside the pipeline.
    """

    stored: Number
    at_rest: Number
    layers_at_rest: Number
    gathered: Number
    layer_at_rest: Number
    layer_gathered: Number
    projection: Number
    shared_at_rest: Number
    shared: Number
    outside_at_rest: Number = 0.0
    outside: Number = 0.0

    @property
    def outside_rows(self) -> Number:
        """Return the parameters in the rows of layers outside the pipeline, with padding."""
        return self.stored - self.at_rest + self.outside_at_rest

    @property
    def layers_gathered(self) -> Number:
        """Return the parameters of all layers of chunks, whole over all storage axes."""
        return self.layers_at_rest * self.layer_gathered / self.layer_at_rest


class StageLayers(NamedTuple):
    """Layers that a stage has on an engine of one program.

    Attributes:
      in_chunks: layers of its chunks, all as large as the largest.
      in_rows: places for layers outside the pipeline, used or padding.
      outside: layers outside the pipeline, which the stages share.
    """

    in_chunks: Number
    in_rows: Number
    outside: Number


class WeightsOfParts(NamedTuple):
    """Parameters of parts of a model on one device, as numbers of values.

    Attributes:
      layer_at_rest, layer_over_fsdp, layer_gathered: those of a layer: at rest, whole over fsdp and
        whole over all storage axes.
      outside_layer: parameters of a layer outside the pipeline, laid out for use.
      ends, ends_over_fsdp: parameters of embedding and head: at rest and whole over fsdp.
      projection: as in `ParameterCounts`.
      shared_at_rest, shared: those of the head and of first dense layers: at rest and whole over
        all storage axes.
    """

    layer_at_rest: float
    layer_over_fsdp: float
    layer_gathered: float
    outside_layer: float
    ends: float
    ends_over_fsdp: float
    projection: float
    shared_at_rest: float
    shared: float

    def on_stage(self, layers: StageLayers) -> ParameterCounts:
        in_chunks = layers.in_chunks * self.layer_at_rest
        outside_at_rest = layers.outside * self.outside_layer
        outside = layers.outside * self.layer_gathered
        return ParameterCounts(
            stored=self.ends + in_chunks + layers.in_rows * self.layer_at_rest,
            at_rest=self.ends + in_chunks + outside_at_rest,
            layers_at_rest=in_chunks,
            gathered=self.ends_over_fsdp + layers.in_chunks * self.layer_over_fsdp,
            layer_at_rest=self.layer_at_rest,
            layer_gathered=self.layer_gathered,
            projection=self.projection,
            shared_at_rest=self.shared_at_rest + outside_at_rest,
            shared=self.shared + outside,
            outside_at_rest=outside_at_rest,
            outside=outside,
        )


class Use(NamedTuple):
    """How an engine uses weights.

    Attributes:
      microbatches, repeats, layers: M, V, and layers of a chunk.
      period: the fewest microbatches that a conveyor holds, S or twice that.
      per_repeat, once: 1 where weights are gathered that often, else 0.
      in_steps: 1 where they are gathered in steps, else 0.
      size, stored: bytes of a value in computation, and at rest.
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


def weights_held(
    engine: Engine, weights: ParameterCounts, use: Use, trained: ParameterCounts | None = None
) -> Held:
    """Return what an engine of one program holds besides parameters and optimizer at rest.

    Args:
      engine: facts about the engine.
      weights: all parameters.
      use: how the engine uses them.
      trained: the parameters that have a gradient; None if all have one.
    """
    trained = weights if trained is None else trained
    if not engine.has_stages:
        return _sequential(weights, trained, use)
    compute = _lockstep if engine.lockstep else _circular
    return compute(weights, trained, use)


def _sequential(weights: ParameterCounts, trained: ParameterCounts, use: Use) -> Held:
    # A microbatch's gradients wait until all are computed, and are then added.
    several = np.greater(use.microbatches, 1)
    waiting = use.stored * trained.at_rest * several
    whole = weights.layers_gathered - weights.layers_at_rest
    # A loop over layers allocates all gradients at its start.
    late = use.unrolled * np.where(several, use.stored, FLOAT32) * trained.layers_at_rest
    return Held(
        copies=_cast_layers(weights, use) + use.keeps_gathered * use.size * whole,
        gradients=FLOAT32 * trained.at_rest + waiting,
        late=late,
        # A layer and its gradient.
        unit=use.size * (weights.layer_gathered + trained.layer_gathered),
        head=use.size * (weights.projection + trained.projection),
    )


def _cast_layers(weights: ParameterCounts, use: Use) -> Number:
    """Return the bytes of all layers of chunks in the dtype of activations.

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
    # Gradients of layers outside the pipeline come all at once.
    outside = use.once * trained.outside
    outside += each * (trained.outside_at_rest + whole) * np.greater(trained.outside_at_rest, 0)
    gradients = np.maximum(gradients, outside)
    # In mode `once` the head and the sum of its gradients are whole, too; the embedding is not.
    embedding = trained.at_rest - trained.layers_at_rest - trained.shared_at_rest
    whole_sums = trained.layers_gathered + trained.shared + embedding
    # In steps the gradients of all layers of a chunk are whole, in the dtype of activations.
    whole_chunk = use.in_steps * use.layers * trained.layer_gathered
    return Held(
        # If weights are gathered in steps, XLA casts all shards before the loop, too.
        copies=np.maximum(use.in_steps, each * is_whole) * _cast_layers(weights, use)
        + use.once * use.size * (weights.layers_gathered + weights.shared)
        # Layers outside the pipeline are laid out for use.
        + use.stored * weights.outside_at_rest,
        gradients=FLOAT32 * (each * trained.at_rest + use.once * whole_sums),
        late=0.0,
        unit=each * (1.0 - is_whole) * use.size * (chunk + whole_chunk) + FLOAT32 * gradients,
        head=each * use.size * weights.projection + FLOAT32 * trained.projection,
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
    # Layers outside the pipeline are gathered one by one, and have gradients at rest in any mode.
    rows = trained.outside_rows - (1.0 - use.once) * trained.outside_at_rest
    is_outside = np.greater(weights.outside_at_rest, 0)
    at_once = np.maximum(each * chunk, is_outside * weights.layer_gathered)
    return Held(
        copies=each * _cast_layers(weights, use)
        + use.size * (sets * chunk + use.once * weights.gathered)
        # Gradients of the projection: the logits of all microbatches are made at once.
        + use.size * trained.projection
        + use.stored * weights.outside_at_rest,
        gradients=FLOAT32 * ((1.0 - use.once) * done + whole + rows),
        late=0.0,
        # A chunk's weights, or those of a layer outside, and a layer's gradient before it is added.
        unit=use.size * (at_once + trained.layer_gathered),
        head=use.size * weights.projection,
    )
