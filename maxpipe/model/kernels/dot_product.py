"""Attention by two matrix products with the whole [T, T] matrix between them; runs on every backend."""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn, attention_of_queries, dot_product_attention
from maxpipe.sharding.context_parallel import PartAttention


class DotProduct:
    """`jax.nn.dot_product_attention` as XLA compiles it."""

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int) -> AttentionFn:
        return dot_product_attention

    @staticmethod
    def build_engine_inputs(config: ModelConfig, parts: np.ndarray) -> PartAttention:
        def attention(
            q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, part: jax.Array
        ) -> jax.Array:
            return attention_of_queries(q, k, v, segment_ids, jnp.asarray(parts)[part])

        return attention
