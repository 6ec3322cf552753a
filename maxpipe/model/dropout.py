"""Dropout whose mask depends on (key, sequence, token) only, so that no layout of devices changes it."""

from typing import Any

import jax
import jax.numpy as jnp


def dropout(x_BTD: jax.Array, rate: float, key: jax.Array, side: dict[str, Any]) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
      x_BTD: [batch, tokens, embed].
      rate: in [0, 1).
      key: key of the step, layer and sublayer.
      side: sequence_index int32 [batch], of each sequence in the global batch; segment_ids and positions int32
        [batch, tokens], which tell the tokens of a sequence apart in whatever order they are.
    """

    def keep_token(key: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, segment), position)
        return jax.random.bernoulli(key, 1 - rate, x_BTD.shape[2:])

    def keep(sequence: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return jax.vmap(keep_token, (None, 0, 0))(jax.random.fold_in(key, sequence), segments, positions)

    mask = jax.vmap(keep)(side["sequence_index"], side["segment_ids"], side["positions"])
    return jnp.where(mask, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
