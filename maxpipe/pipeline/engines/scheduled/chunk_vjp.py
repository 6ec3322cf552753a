"""Say what a chunk of layers computes on, and which of its parameters have a gradient.

Frozen parameters are inputs of its vjp, not weights: nothing is saved for their gradients, and none
is computed or summed. Letters as in `stage_program`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, has_frozen, trainable, with_trainable
from maxpipe.pipeline.engines.scheduled.carry import Layers
from maxpipe.pipeline.split_vjp import SplitVjp


class ChunkInputs(NamedTuple):
    """What a chunk reads besides its activation and its parameters; nothing of it has a gradient.

    Attributes:
      layer_index: the layers' indices in model order, int32 [L].
      side: side inputs of the microbatch, [B, ...] each.
      base: all parameters of the chunk if some are frozen, while its weights are the trained
        ones; else None.
    """

    layer_index: jax.Array
    side: SideInputs
    key: jax.Array | None
    base: Params | Layers | None = None


ChunkOutputs = tuple[jax.Array, AuxiliaryLosses]  # (activation [B, T, D], auxiliary losses)
Weights = Params | Layers  # of a chunk: leaves [L, ...], or a tuple with one tree per layer
Chunk = Callable[[jax.Array, Weights, ChunkInputs], ChunkOutputs]
ChunkVjp = SplitVjp[Weights, ChunkInputs, ChunkOutputs]


def with_base(specs: Params, weights: Weights, inputs: ChunkInputs) -> tuple[Weights, ChunkInputs]:
    """Return the weights and inputs of a chunk's vjp, with all parameters if some are frozen."""
    if not has_frozen(specs):
        return weights, inputs
    # The base holds the trained ones too, which nothing reads there: `all_weights` replaces them.
    if isinstance(weights, tuple):
        trained: Weights = tuple(trainable(specs, layer) for layer in weights)
    else:
        trained = trainable(specs, weights)
    return trained, inputs._replace(base=weights)


def all_weights(weights: Weights, inputs: ChunkInputs) -> Weights:
    """Return all parameters of a chunk, from what `with_base` returns."""
    return weights if inputs.base is None else with_trainable(inputs.base, weights)
