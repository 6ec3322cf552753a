"""Compute what an engine keeps from forwards to backwards, for one configuration or for many.

Every number may be an array with an entry for each of many candidates. Widths are values of
`model.dtype` per token of a microbatch.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from typing import NamedTuple, TypeAlias

import numpy as np

Number: TypeAlias = float | np.ndarray
FLOAT32 = 4.0  # bytes


class Widths(NamedTuple):
    """Widths of one layer.

    Attributes:
      embed: D, width of an activation between layers.
      residuals: what a layer saves besides the input of its chunk.
      stash: what a layer's I leaves to its W.
    """

    embed: Number
    residuals: Number
    stash: Number


class Store(NamedTuple):
    """What is kept at the fullest moment.

    Attributes:
      units: chunks whose residuals are kept; layers where there are no chunks.
      inputs: activations or gradients that wait for a unit.
      stashes: chunks between their I and their W.
      outside: microbatches whose residuals are kept by layers outside the pipeline and by first
        dense layers.
      masks: activations for which a mask of one byte per value is kept.
      has_chunks: whether a unit is a chunk.
    """

    units: Number
    inputs: Number = 0.0
    stashes: Number = 0.0
    outside: Number = 0.0
    masks: Number = 0.0
    has_chunks: bool = True


def sequential_store(num_layers: Number) -> Store:
    """Return what an engine without stages keeps: every layer's residuals.

    `num_layers` counts the layers with the same shapes of parameters.
    """
    return Store(num_layers, outside=1.0, has_chunks=False)


def lockstep_store(
    residuals: Number, arrivals: Number, stash: Number, stages: Number, rows: Number
) -> Store:
    """Return what a lockstep engine keeps.

    Args:
      residuals: slots of the residual store; each store has one more, for scratch.
      arrivals: slots of the stores of activations and gradients.
      stash: slots of the stash, 0 without split backwards.
      stages: S.
      rows: rows of a microbatch on one device.
    """
    outside = lockstep_share(rows, stages)  # of one microbatch, within a tick
    return Store(residuals + 1, arrivals + 2, stash + np.greater(stash, 0), outside)


def lockstep_share(rows: Number, stages: Number) -> Number:
    """Return the share of a microbatch that a stage has in layers outside the pipeline.

    Stages divide its sequences, each of which is on one stage, and pad them to equal numbers.

    Args:
      rows: rows of a microbatch on one device, at least one.
      stages: S.
    """
    return np.ceil(np.divide(rows, stages)) / rows


def circular_store(
    stages: Number, microbatches: Number, repeats: Number, delay: Number, by_autodiff: Number
) -> Store:
    """Return what the circular engine keeps: a unit of every iteration, and the conveyor.

    Args:
      stages, microbatches, repeats: S, M, V.
      delay: delay of a transfer, in iterations.
      by_autodiff: 1 where JAX differentiates the loop over iterations, else 0.
    """
    iterations = microbatches * repeats + delay * (stages - 1)
    # The conveyor of inputs and outputs, and its gradient. Each stage runs the layers outside the
    # pipeline on its microbatches. Autodiff keeps the masks that choose each iteration's input and
    # output.
    return Store(
        iterations,
        2 * microbatches / stages,
        outside=microbatches / stages,
        masks=2 * iterations * by_autodiff,
    )


def stored_columns(
    store: Store,
    layers: Number,
    outside_layers: Number,
    widths: Widths,
    itemsize: float,
    first: Number = 0.0,
) -> Number:
    """Return the width of everything that is kept from forwards to backwards.

    Args:
      store: what the engine keeps.
      layers: layers of a chunk.
      outside_layers: layers outside the pipeline, without the first dense ones.
      widths: widths of a layer.
      itemsize: bytes of a value.
      first: width of what the first dense layers keep of a microbatch.
    """
    if not store.has_chunks:
        layers, outside_layers = 1.0, 0.0
    return (
        store.units * (widths.embed + layers * widths.residuals)
        + store.inputs * widths.embed
        + store.stashes * layers * widths.stash
        + store.masks * widths.embed / itemsize
        + store.outside * (outside_layers * (widths.embed + widths.residuals) + first)
    )


def tile_bytes(tokens: Number, tiles: Number, columns: float, itemsize: float) -> Number:
    """Return the bytes of a tile of logits, float32, and of their gradient, on one device.

    Args:
      tokens: tokens on the device.
      tiles: number of tiles into which these tokens are cut.
      columns: columns of the vocabulary on the device.
      itemsize: bytes of a value of `model.dtype`.
    """
    return (FLOAT32 + itemsize) * np.ceil(np.divide(tokens, tiles)) * columns
