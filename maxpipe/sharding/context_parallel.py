"""Context parallelism: the parts of a sequence on the devices along mesh axis `context`, and attention between them.

A sequence is cut into 2C chunks, of which device i holds chunks i and 2C - 1 - i, so that all have
the same work behind a causal mask; each gathers the keys and values of all for its own queries
(Llama 3 herd of models, 2024, section 3.3.2). The places are those of the tokens laid end to end,
device by device.

Letters: B sequences, T tokens of a sequence, C devices along the axis, P = T / C tokens on each; H
query heads, K key/value heads, D head_dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "context"

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# (query [B,P,H,D], key and value [B,T,K,D], segment_ids int32 [B,T], index of the part) ->
# [B,P,H,D]
PartAttention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def parts(length: int, count: int) -> np.ndarray:
    """int32 [C, P]: the tokens on each of `count` devices; 2C divides `length`."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * count, -1)
    return np.concatenate([chunks[:count], chunks[: count - 1 : -1]], axis=1)


def in_places(x: jax.Array, count: int) -> jax.Array:
    """[B, T] in the order of tokens -> in that of their places on `count` devices."""
    chunks = parts(2 * count, count).reshape(-1)
    return x.reshape(x.shape[0], 2 * count, -1)[:, chunks].reshape(x.shape)


def in_order(x: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] in the order of places -> in that of the tokens, without a gather of single tokens."""
    pairs = x.reshape(x.shape[0], count, 2, -1, *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def over_context(attention: PartAttention) -> Attention:
    """Attention of a device's own queries [B,P,H,D] to all keys, from its part of everything.

    For use in a program that is manual over the axis.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
        count = lax.axis_size(AXIS)
        k, v = (in_order(gathered(x), count) for x in (k, v))
        segment_ids = in_order(_all(segment_ids), count)
        return attention(q, k, v, segment_ids, lax.axis_index(AXIS))

    return run


@jax.custom_vjp
def gathered(x: jax.Array) -> jax.Array:
    """[B, P, ...] -> [B, T, ...] by places; gradients of all devices are added up in float32."""
    return _all(x)


def _all(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def _scattered(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # Sums are float32 for accuracy; bfloat16 ones also abort XLA's CPU backend in partially manual
    # programs.
    total = lax.psum_scatter(gradient.astype(jnp.float32), AXIS, scatter_dimension=1, tiled=True)
    return (total.astype(gradient.dtype),)


gathered.defvjp(lambda x: (_all(x), None), _scattered)
