"""Define the attention sublayer: grouped queries, causal within a packed sequence's segments.

Shapes: B batch, T sequence, D embed, H query heads, K key/value heads, C head_dim.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig
from maxpipe.model.layers import RMSNorm, frequencies, project, rotate
from maxpipe.model.parameters import declare

# (query [B,T,H,C], key [B,T,K,C], value [B,T,K,C], segment_ids int32 [B,T]) -> [B,T,H,C]
AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(nnx.Module):
    """Project, normalise heads if configured, rotate, attend, and project the output."""

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        D, H, K, C = config.embed_dim, config.num_query_heads, config.num_kv_heads, config.head_dim
        self.attention = attention
        self.freq = tuple(frequencies(C, config.rope_theta, config.rope_scaling).tolist())
        dtype, std = config.param_dtype, 1 / math.sqrt(D)
        self.query = declare((D, H, C), ("embed", "heads", "head_dim"), dtype, stddev=std)
        self.key = declare((D, K, C), ("embed", "kv_heads", "head_dim"), dtype, stddev=std)
        self.value = declare((D, K, C), ("embed", "kv_heads", "head_dim"), dtype, stddev=std)
        # Sublayer outputs start small so that the residual stream's variance does not grow with
        # depth (GPT-2).
        out_std = 1 / math.sqrt(H * C * 2 * config.num_layers)
        self.out = declare((H, C, D), ("heads", "head_dim", "embed"), dtype, stddev=out_std)
        self.has_bias = config.attention_bias
        if config.attention_bias:
            self.query_bias = declare((H, C), ("heads", "head_dim"), dtype)
            self.key_bias = declare((K, C), ("kv_heads", "head_dim"), dtype)
            self.value_bias = declare((K, C), ("kv_heads", "head_dim"), dtype)
        self.has_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = RMSNorm(C, eps=config.norm_eps, dtype=dtype)
            self.key_norm = RMSNorm(C, eps=config.norm_eps, dtype=dtype)

    def project(
        self, x_BTD: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query [B,T,H,C], key and value [B,T,K,C]; query and key are rotated."""
        q = project(x_BTD, self.query[...])
        k = project(x_BTD, self.key[...])
        v = project(x_BTD, self.value[...])
        if self.has_bias:
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        q = checkpoint_name(q, "query_proj")
        k = checkpoint_name(k, "key_proj")
        v = checkpoint_name(v, "value_proj")
        if self.has_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        freq = np.asarray(self.freq, np.float32)
        return rotate(q, positions, freq), rotate(k, positions, freq), v

    def __call__(self, x_BTD: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """Apply the sublayer: x [B,T,D], positions and segment_ids int32 [B,T] -> [B,T,D]."""
        q, k, v = self.project(x_BTD, positions)
        context = checkpoint_name(self.attention(q, k, v, segment_ids), "context")
        return checkpoint_name(project(context, self.out[...], 2), "out_proj")
