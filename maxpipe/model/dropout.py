"""Dropout whose mask depends on (key, global sequence index) only, so that no layout of devices changes it."""

import jax
import jax.numpy as jnp


def dropout(x_BTD: jax.Array, rate: float, key: jax.Array, sequence_index: jax.Array) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
      x_BTD: [batch, sequence, embed].
      rate: in [0, 1).
      key: key of the step, layer and sublayer.
      sequence_index: int32 [batch], index of each sequence in the global batch.
    """

    def keep(index: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - rate, x_BTD.shape[1:])

    return jnp.where(jax.vmap(keep)(sequence_index), x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
