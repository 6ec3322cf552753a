"""Running the layers of one chunk. Letters: L layers, B sequences of a microbatch, T sequence, D embed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram

# (layer parameters, layer index, activations, side inputs, key of the step or None) ->
# (activations, auxiliary loss)
LayerFn = Callable[[Params, jax.Array, jax.Array, Any, Any], tuple[jax.Array, jax.Array]]


def layer_function(
    program: ModelProgram, prepare: Callable[[Params], Params], *, padded: bool
) -> LayerFn:
    """One layer as engines apply it.

    Args:
      program: the model.
      prepare: makes one layer's parameters ready for use: in the compute dtype, whole over the
        storage axes.
      padded: True if some layers are padding (index = num_layers), which must leave the activations
        alone.
    """

    def apply(
        layer: Params, index: jax.Array, x: jax.Array, side: Any, key: Any
    ) -> tuple[jax.Array, jax.Array]:
        layer_key = (
            jax.random.fold_in(key, index) if program.needs_key and key is not None else None
        )
        y, aux = program.block(prepare(layer), x, side, layer_key)
        if not padded:
            return y, aux
        valid = index < program.config.num_layers
        return jnp.where(valid, y, x), jnp.where(valid, aux, 0)

    return apply


def apply_layers(
    layer_fn: LayerFn,
    layers: Params,
    index: jax.Array,
    x: jax.Array,
    side: Any,
    key: Any,
    *,
    scan: bool,
) -> tuple[jax.Array, jax.Array]:
    """Applies consecutive layers.

    Args:
      layer_fn: from `layer_function`, perhaps rematerialised.
      layers: leaves [L, ...].
      index: int32 [L], indices in model order.
      x: activations [B, T, D].
      side: side inputs of the microbatch.
      key: key of the step or None.
      scan: one compiled layer in a loop; otherwise L copies.

    Returns:
      (activations, auxiliary loss summed over layers and sequences).
    """
    if scan and index.shape[0] > 1:

        def body(
            carry: tuple[jax.Array, jax.Array], layer: Any
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            y, aux = layer_fn(layer[0], layer[1], carry[0], side, key)
            return (y, carry[1] + aux), None

        return jax.lax.scan(body, (x, jnp.zeros((), jnp.float32)), (layers, index))[0]
    total = jnp.zeros((), jnp.float32)
    for i in range(index.shape[0]):
        x, aux = layer_fn(jax.tree.map(lambda p, i=i: p[i], layers), index[i], x, side, key)
        total += aux
    return x, total
