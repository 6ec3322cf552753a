"""Run the layers of one chunk. Letters: see `maxpipe.pipeline`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxpipe.model.layers import SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram

# (layer parameters, layer index, activations [B, T, D], side inputs, key of the step or None) ->
# (activations [B, T, D], auxiliary loss)
LayerFn = Callable[
    [Params, jax.Array, jax.Array, SideInputs, jax.Array | None], tuple[jax.Array, jax.Array]
]


def layer_function(
    program: ModelProgram, prepare: Callable[[Params], Params], *, padded: bool
) -> LayerFn:
    """Return one layer as engines apply it.

    Args:
      program: the model.
      prepare: makes one layer's parameters ready for use: casts them to the compute dtype and
        gathers them over the storage axes.
      padded: whether some layers are padding (index = num_layers), which must return the
        activations unchanged.
    """

    def apply(
        layer: Params, index: jax.Array, x: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        layer_key = (
            jax.random.fold_in(key, index) if program.needs_key and key is not None else None
        )
        y, aux = program.block(prepare(layer), x, side, layer_key)
        if not padded:
            return y, aux
        is_layer = index < program.config.num_layers
        return jnp.where(is_layer, y, x), jnp.where(is_layer, aux, 0)

    return apply


def apply_layers(
    layer_fn: LayerFn,
    layers: Params,
    index: jax.Array,
    x: jax.Array,
    side: SideInputs,
    key: jax.Array | None,
    *,
    scan: bool,
) -> tuple[jax.Array, jax.Array]:
    """Apply consecutive layers.

    Args:
      layer_fn: from `layer_function`, perhaps rematerialised.
      layers: leaves [L, ...].
      index: int32 [L], indices in model order.
      x: activations [B, T, D].
      side: side inputs of the microbatch.
      key: key of the step or None.
      scan: compile one layer in a loop; otherwise L copies.

    Returns:
      (activations, auxiliary loss summed over layers and sequences).
    """
    if scan and index.shape[0] > 1:

        def body(
            carry: tuple[jax.Array, jax.Array], layer: tuple[Params, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            y, aux = layer_fn(layer[0], layer[1], carry[0], side, key)
            return (y, carry[1] + aux), None

        return jax.lax.scan(body, (x, jnp.zeros((), jnp.float32)), (layers, index))[0]
    total = jnp.zeros((), jnp.float32)
    for i in range(index.shape[0]):
        x, aux = layer_fn(jax.tree.map(lambda p, i=i: p[i], layers), index[i], x, side, key)
        total += aux
    return x, total
