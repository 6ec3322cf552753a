"""Split sequences over the devices along mesh axis `context`, and attend across them.

A sequence is cut into 2C chunks, of which device i holds chunks i and 2C - 1 - i, so that all have
the same work under a causal mask. Each device gathers all keys and values for its own queries
(Llama 3 herd of models, 2024, section 3.3.2). The place of a token is its position when the
devices' parts are laid end to end.

Example: T=8, C=2. Device 0 holds tokens 0 1 6 7, device 1 holds tokens 2 3 4 5.

Letters: B sequences, T tokens of a sequence, C devices along the axis, P = T / C tokens on each; H
query heads, K key/value heads, D head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxpipe.sharding.attention_contract import PLAIN, AttentionFn, AttentionOptions, PartAttention
from maxpipe.sharding.collectives import CONTEXT_AXIS, gathered


def parts(length: int, count: int) -> np.ndarray:
    """Return the tokens on each of C = `count` devices, int32 [C, P]; 2C divides `length`."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * count, -1)  # [2C, P/2]
    return np.concatenate([chunks[:count], chunks[: count - 1 : -1]], axis=1)


def in_places(x: jax.Array, count: int) -> jax.Array:
    """Reorder [B, T] from the order of tokens to that of their places on `count` devices."""
    chunks = parts(2 * count, count).reshape(-1)  # the chunk at each place, [2C]
    # [B, T] -> [B, 2C, P/2] -> [B, T]
    return x.reshape(x.shape[0], 2 * count, -1)[:, chunks].reshape(x.shape)


def in_order(x: jax.Array, count: int) -> jax.Array:
    """Reorder [B, T, ...] from the order of places to that of tokens, in slices of chunks."""
    pairs = x.reshape(x.shape[0], count, 2, -1, *x.shape[2:])  # [B, C, 2, P/2, ...]
    # First chunks ascend from device 0, second chunks descend: [B, 2C, P/2, ...] -> [B, T, ...]
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def over_context(attention: PartAttention) -> AttentionFn:
    """Return attention of a device's own queries [B,P,H,D] to all keys, given its part of both.

    For use in a program that is manual over the axis.
    """

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        count, part = lax.axis_size(CONTEXT_AXIS), lax.axis_index(CONTEXT_AXIS)
        k, v = (in_order(gathered(x, CONTEXT_AXIS, 1), count) for x in (k, v))
        segment_ids = lax.all_gather(segment_ids, CONTEXT_AXIS, axis=1, tiled=True)
        segment_ids = in_order(segment_ids, count)
        return attention(q, k, v, segment_ids, part, options)

    return run


def sequence_parts() -> int:
    """Return how many parts a sequence has: 1 unless the program is manual over the axis."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return lax.axis_size(CONTEXT_AXIS) if CONTEXT_AXIS in manual else 1


def sum_over_sequence(x: jax.Array) -> jax.Array:
    """Sum `x` over the parts of a sequence, differentiably; every part gets the sum."""
    return lax.psum(x, CONTEXT_AXIS) if sequence_parts() > 1 else x
