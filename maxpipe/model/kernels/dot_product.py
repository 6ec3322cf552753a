"""Attend by two matrix products with the full [T, T] matrix between them; runs everywhere.

Shapes: B batch, T sequence, P queries of a part, H query heads, K key/value heads, C head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn
from maxpipe.sharding.context_parallel import PartAttention


def dot_product_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Attend to earlier tokens of the same segment: q [B,T,H,C], k and v [B,T,K,C] -> [B,T,H,C]."""
    same_segment = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # [B, 1, T, T]
    return jax.nn.dot_product_attention(q, k, v, mask=same_segment, is_causal=True)


def attention_of_queries(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Compute `dot_product_attention` of the queries of `tokens`, int32 [P]; q is [B,P,H,C]."""
    # [B, 1, P, T]
    same_segment = segment_ids[:, tokens][:, None, :, None] == segment_ids[:, None, None, :]
    not_later = tokens[:, None] >= jnp.arange(k.shape[1])  # [P, T]
    return jax.nn.dot_product_attention(q, k, v, mask=same_segment & not_later)


class DotProduct:
    """The kernel for every backend: `jax.nn.dot_product_attention` as XLA compiles it."""

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int) -> AttentionFn:
        return dot_product_attention

    @staticmethod
    def build_for_parts(config: ModelConfig, parts: np.ndarray) -> PartAttention:
        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, part: jax.Array
        ) -> jax.Array:
            return attention_of_queries(q, k, v, segment_ids, jnp.asarray(parts)[part])

        return attention
