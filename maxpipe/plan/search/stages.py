"""Compute the memory of the fullest stage of a block's candidates on the mpmd engine.

It follows `planning.stage_memory.StageMemory`, for chunks of equal size. Three stages are compared:
those with the first and the last chunk, which are the same in schedules that turn back, and the
fullest of the others.
"""

import numpy as np

from maxpipe.plan.footprint import itemsize, optimizer_bytes
from maxpipe.plan.search.patterns import FIRST_STAGE, LAST_STAGE, OTHER_STAGES
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.stores import FLOAT32, Number


def stage_bytes(sizes: BlockSizes, unit: Number, logits: Number, first_excess: Number) -> Number:
    """Return the bytes on a device of the fullest stage, an array of the block's dimensions.

    Args:
      sizes: sizes and counts of the block's candidates.
      unit: bytes that the largest unit of a middle chunk works with.
      logits: bytes of logits and their gradient, which the last chunk's stage works with before its
        backward begins.
      first_excess: further bytes that a unit of the first chunk needs for first dense layers.
    """
    turns_back = sizes.of_pattern("turns_back")
    stages: dict[int, tuple[Number, Number]] = {
        FIRST_STAGE: (1.0, turns_back),
        LAST_STAGE: (turns_back, 1.0),
        OTHER_STAGES: (0.0, 0.0),
    }
    totals = [
        _state(sizes, first, last)
        + _in_flight(sizes, place, first)
        + np.maximum(unit + first * first_excess, last * logits)
        + _weights_of_ends(sizes, first, last)
        for place, (first, last) in stages.items()
    ]
    return np.maximum.reduce(np.broadcast_arrays(*totals))


def _state(sizes: BlockSizes, first: Number, last: Number) -> Number:
    """Return the bytes of parameters, optimizer state and sums of gradients of a stage.

    Args:
      sizes: sizes and counts of the block's candidates.
      first, last: 1 where the stage has the first, or the last, chunk; else 0.
    """
    model, parameters = sizes.config.model, sizes.parameters
    layers = sizes.layers * sizes.repeats
    # The embedding's parameters include those of the first dense layers.
    owned = layers * parameters.layer_at_rest + first * parameters.embed_of_stage
    owned = owned + last * parameters.head_of_stage
    # Tied embeddings are copied to the stage of the head, without optimizer state.
    tied = model.tie_embeddings * last
    copied = tied * (1.0 - first) * parameters.embed_of_stage
    whole = layers * parameters.layer_gathered + first * parameters.embed_gathered
    whole = whole + last * parameters.head_gathered
    sums = whole + tied * (1.0 - first) * parameters.embed_gathered
    stored = itemsize(model.param_dtype)
    state = owned * (stored + optimizer_bytes(sizes.config)) + copied * stored
    gathered = (whole + tied * parameters.embed_gathered) * sizes.itemsize
    each_time = FLOAT32 * (owned + copied)
    return state + np.where(sizes.gathers_once > 0, gathered + FLOAT32 * sums, each_time)


def _in_flight(sizes: BlockSizes, place: int, first: Number) -> Number:
    """Return the bytes of chunks in flight on a stage, and of what has arrived there.

    Args:
      sizes: sizes and counts of the block's candidates.
      place: place of the stage, one of the three in `InFlight`.
      first: 1 where it has the first chunk, which runs the first dense layers, too.
    """
    embed, layers = sizes.config.model.embed_dim, sizes.layers
    unit = embed + layers * sizes.residuals
    handed_over = embed + layers * sizes.handed_over
    at = sizes.in_flight(place)
    dense = at.saved_first * sizes.first_kept + at.handed_over_first * sizes.first_handed_over
    columns = at.saved * unit + at.handed_over * handed_over + first * dense + at.arrived * embed
    return sizes.tokens * sizes.itemsize * columns.max(axis=0)


def _weights_of_ends(sizes: BlockSizes, first: Number, last: Number) -> Number:
    """Return the bytes of embedding and head as units compute with them, and of their gradients.

    Args:
      sizes: sizes and counts of the block's candidates.
      first, last: 1 where the stage has the first, or the last, chunk; else 0.
    """
    parameters, once = sizes.parameters, sizes.gathers_once
    tied = sizes.config.model.tie_embeddings
    projection = last * (parameters.embed_gathered if tied else parameters.head_gathered)
    embedding = first * parameters.embed_gathered * sizes.itemsize
    each_time = np.maximum(embedding, projection * (sizes.itemsize + FLOAT32))
    return np.where(once > 0, projection * sizes.itemsize, each_time)
