"""Hold what a stage keeps from tick to tick, stores of buffer slots and sums, and what chunks read.

Frozen parameters of a chunk are inputs of its vjp, not weights: nothing is saved for their
gradients, and none is computed or summed. Letters as in `stage_program`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, has_frozen, trainable, with_trainable
from maxpipe.pipeline.engines.scheduled.tick_plan import PlanArray
from maxpipe.pipeline.split_vjp import Arrays, SplitVjp

Layers = tuple[Params, ...]  # parameters of each layer of a chunk, without a layer dimension


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


class Carry(NamedTuple):
    """What a tick hands on to the next: stores, then sums.

    Attributes:
      activations, gradients: those that arrived, [slots + 1, B, T, D]; the last slot is scratch.
      residuals: a store [slots + 1, ...] for each residual of a unit.
      stash: a store for each array that an I leaves to its W; empty if backwards are not split.
      outgoing_activation, outgoing_gradient: with delayed forwarding what the next transfer sends,
        [B, T, D]; else None.
      layer_gradients: gradients of this stage's layers, float32 [V, L, ...]; these and the
        following are None where a parameter is frozen.
      outer_gradients: gradients of the parameters that the head takes, float32.
      before_gradients: gradients of the layers before the pipeline, float32; empty without any.
      table_gradient: gradient of the local columns of the embedding table, float32.
      loss: this stage's sum of the loss, float32 scalar.
      aux: this stage's sums of auxiliary losses.
    """

    activations: jax.Array
    gradients: jax.Array | None
    residuals: Arrays
    stash: Arrays
    outgoing_activation: jax.Array | None
    outgoing_gradient: jax.Array | None
    layer_gradients: Params | None
    outer_gradients: Params | None
    before_gradients: Params | None
    table_gradient: jax.Array | None
    loss: jax.Array
    aux: AuxiliaryLosses


def read(store: jax.Array, slot: PlanArray) -> jax.Array:
    """Return slot `slot` of a store: [slots + 1, ...] -> [...]."""
    return lax.dynamic_index_in_dim(store, slot, keepdims=False)


def read_chunk(stores: Params, chunk: PlanArray) -> Params:
    """Return the parameters [L, ...] of a chunk, from stores [V, L, ...]."""
    return jax.tree.map(lambda store: read(store, chunk), stores)


def read_layers(stores: Params, chunk: PlanArray) -> Layers:
    """Return the parameters of each layer of a chunk, from stores [V, L, ...].

    Where each layer is used by itself, a slice of all layers would be one more copy.
    """

    def layer(i: int) -> Params:
        def slice_of(store: jax.Array) -> jax.Array:
            starts = [chunk, i, *[0] * (store.ndim - 2)]
            return lax.dynamic_slice(store, starts, (1, 1, *store.shape[2:]))[0, 0]

        return jax.tree.map(slice_of, stores)

    return tuple(layer(i) for i in range(jax.tree.leaves(stores)[0].shape[1]))


def write(store: jax.Array | None, slot: PlanArray, value: jax.Array) -> jax.Array:
    """Return the store [slots + 1, ...] with one slot overwritten by `value` [...]."""
    return lax.dynamic_update_index_in_dim(store, value, slot, 0)


def read_all(stores: Sequence[jax.Array], slot: PlanArray) -> Arrays:
    return [read(store, slot) for store in stores]


def write_all(stores: Sequence[jax.Array], slot: PlanArray, values: Sequence[jax.Array]) -> Arrays:
    return [write(store, slot, value) for store, value in zip(stores, values, strict=True)]


def add_to_layers(
    carry: Carry, active: PlanArray, chunk: PlanArray, gradients: Params | Layers
) -> Carry:
    """Add a chunk's gradients to this stage's [V, L, ...], zeros if the slot is idle.

    The gradients are [L, ...], or a tuple with one tree per layer.
    """

    # A selection, not a product with 0: an idle slot may have computed NaN.
    def add_at(*place: PlanArray | int) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda total, g: total.at[place].add(jnp.where(active, g, 0).astype(total.dtype))

    totals = carry.layer_gradients
    if isinstance(gradients, tuple):
        for i, layer in enumerate(gradients):
            totals = jax.tree.map(add_at(chunk, i), totals, layer)
    else:
        totals = jax.tree.map(add_at(chunk), totals, gradients)
    return carry._replace(layer_gradients=totals)


def add_auxiliary(total: AuxiliaryLosses, more: AuxiliaryLosses) -> AuxiliaryLosses:
    """Return the sums; `more` is empty where there are no layers."""
    return {name: value + more[name] if more else value for name, value in total.items()}


def filled(shape: tuple[int, ...], dtype: jnp.dtype, value: float | None) -> jax.Array:
    """Return an array of `value`, or of zeros if the dtype is not floating.

    With None floats are not initialised, which costs TPUs and GPUs no time. Integers are zeros even
    then, since they may be indices or sizes.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return lax.empty(shape, dtype) if value is None else jnp.full(shape, value, dtype)
