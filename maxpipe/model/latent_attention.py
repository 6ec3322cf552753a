"""Define multi-head latent attention (DeepSeek-V2, 2024): keys and values from a narrow latent.

Shapes: B batch, T sequence, D embed, H heads, L kv_lora_rank, N unrotated channels of a query and
key, R rotated ones, C = N + R, V channels of a value.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import LayerFacts, look_up, query_factor, rotate
from maxpipe.model.layer_facts import layer_table
from maxpipe.model.layers import DropFn, RMSNorm, projection
from maxpipe.model.parameters import declare
from maxpipe.sharding.attention_contract import AttentionFn, AttentionOptions, OverLatents

NORM_EPS = 1e-6  # of the latents' norms in DeepSeek's models, whatever other norms have


class LatentAttention(nnx.Module):
    """Compress activations to latents, expand them to queries, keys and values, and attend.

    All heads share the rotated channels of the key, which do not come from the latent. With
    `OverLatents` queries are projected to the latents instead of latents to all heads; the result
    is the same.
    """

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        D, H, mla = config.embed_dim, config.num_query_heads, config.mla
        N, L, Q = mla.qk_nope_head_dim, mla.kv_lora_rank, mla.q_lora_rank
        self.attention = attention
        self.multiply = projection(config)
        self.over_latents = isinstance(attention, OverLatents)
        self.table = layer_table(config)
        self.interleaved = config.rope_interleaved
        self.rotates_by_product = config.rotation == "product"
        self.soft_cap = config.attention_soft_cap
        self.query_scale = query_factor(config)
        self.widths = mla
        dtype, std = config.param_dtype, 1 / math.sqrt(D)
        heads = ("heads", "head_dim")
        self.has_query_latent = Q > 0
        if self.has_query_latent:
            self.query_down = declare((D, Q), ("embed", "head_dim"), dtype, stddev=std)
            self.query_latent_norm = RMSNorm(Q, eps=NORM_EPS, dtype=dtype)
            self.query_up = declare(
                (Q, H, mla.head_dim), ("latent", *heads), dtype, stddev=1 / math.sqrt(Q)
            )
        else:
            self.query = declare((D, H, mla.head_dim), ("embed", *heads), dtype, stddev=std)
        # The latent's channels, then those of the rotated key
        self.key_value_down = declare(
            (D, mla.cached_width), ("embed", "head_dim"), dtype, stddev=std
        )
        self.key_value_latent_norm = RMSNorm(L, eps=NORM_EPS, dtype=dtype)
        # Channels of the key, then those of the value
        self.key_value_up = declare(
            (L, H, N + mla.v_head_dim), ("latent", *heads), dtype, stddev=1 / math.sqrt(L)
        )
        out_std = 1 / math.sqrt(H * mla.v_head_dim * 2 * config.num_layers)  # see `Attention`
        self.out = declare((H, mla.v_head_dim, D), (*heads, "embed"), dtype, stddev=out_std)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        layer_index: jax.Array | None = None,
        drop: DropFn | None = None,
    ) -> jax.Array:
        """Apply the sublayer; arguments as for `Attention`, without adapters."""
        facts = look_up(self.table, layer_index)
        options = AttentionOptions(facts.window, None, self.soft_cap)
        q_nope, q_rope = self._queries(x_BTD, positions, facts)
        latent, k_rope = self._latents(x_BTD, positions, facts)
        attend = self._attend_to_latents if self.over_latents else self._attend_to_heads
        context = attend(q_nope, q_rope, latent, k_rope, segment_ids, options)
        context = _with_gradient_of_its_own(context)
        return checkpoint_name(self.multiply(context, self.out[...], 2), "out_proj")

    def _queries(
        self, x_BTD: jax.Array, positions: jax.Array, facts: LayerFacts
    ) -> tuple[jax.Array, jax.Array]:
        """Return the unrotated part of queries [B,T,H,N] and the rotated part [B,T,H,R]."""
        if self.has_query_latent:
            down = checkpoint_name(self.multiply(x_BTD, self.query_down[...], 1), "query_proj")
            x, weight = self.query_latent_norm(down), self.query_up[...]
        else:
            x, weight = x_BTD, self.query[...]

        def project(weight: jax.Array) -> jax.Array:
            q = checkpoint_name(self.multiply(x, weight, 1), "query_proj")
            return q if self.query_scale == 1 else q * self.query_scale

        # Two products: XLA would copy the result of one to take it apart.
        nope, rope = map(project, jnp.split(weight, [self.widths.qk_nope_head_dim], axis=-1))
        return nope, self._rotate(rope, positions, facts)

    def _latents(
        self, x_BTD: jax.Array, positions: jax.Array, facts: LayerFacts
    ) -> tuple[jax.Array, jax.Array]:
        """Return normalised latents [B,T,L] and the rotated key that all heads share [B,T,1,R]."""
        down = checkpoint_name(self.multiply(x_BTD, self.key_value_down[...], 1), "key_proj")
        latent, rope = jnp.split(down, [self.widths.kv_lora_rank], axis=-1)
        return self.key_value_latent_norm(latent), self._rotate(rope[:, :, None], positions, facts)

    def _rotate(self, x: jax.Array, positions: jax.Array, facts: LayerFacts) -> jax.Array:
        if not self.table.is_rotated:
            return x
        return rotate(
            x,
            positions,
            facts.frequencies,
            facts.factor,
            interleaved=self.interleaved,
            by_product=self.rotates_by_product,
        )

    def _attend_to_heads(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        latent: jax.Array,
        k_rope: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions,
    ) -> jax.Array:
        """Attend with a key [B,T,H,C] and a value [B,T,H,V] of each head: [B,T,H,V]."""
        up_key, up_value = self._expansion()
        k_nope = checkpoint_name(self.multiply(latent, up_key, 1), "key_proj")
        v = checkpoint_name(self.multiply(latent, up_value, 1), "value_proj")
        q, k = _side_by_side(q_nope, q_rope), _side_by_side(k_nope, k_rope)  # [B, T, H, C]
        return checkpoint_name(self.attention(q, k, v, segment_ids, options), "context")

    def _attend_to_latents(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        latent: jax.Array,
        k_rope: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions,
    ) -> jax.Array:
        """Attend with one key [B,T,1,L+R] for all heads, whose latent is the value: [B,T,H,V]."""
        up_key, up_value = self._expansion()
        q_latent = jnp.einsum("bthn,lhn->bthl", q_nope, up_key)
        q = jnp.concatenate([q_latent, q_rope], axis=-1)
        # Kernels divide scores by the root of the width that they see.
        q = q * math.sqrt(self.widths.cached_width / self.widths.head_dim)
        v = latent[:, :, None]
        k = jnp.concatenate([v, k_rope], axis=-1)
        context = self.attention(q, k, v, segment_ids, options)  # [B, T, H, L]
        return jnp.einsum("bthl,lhv->bthv", context, up_value)

    def _expansion(self) -> tuple[jax.Array, jax.Array]:
        """Return the weights that make keys [L,H,N] and values [L,H,V] of latents."""
        up_key, up_value = jnp.split(
            self.key_value_up[...], [self.widths.qk_nope_head_dim], axis=-1
        )
        return up_key, up_value


def _side_by_side(nope: jax.Array, rope: jax.Array) -> jax.Array:
    """Return channels [B,T,H,N] and [B,T,H or 1,R] as [B,T,H,N+R].

    XLA computes a sum in one pass, where it would take several to concatenate them on TPUs.
    """
    N, R = nope.shape[3], rope.shape[3]
    others = ((0, 0),) * 3
    return jnp.pad(nope, (*others, (0, R))) + jnp.pad(rope, (*others, (N, 0)))


@jax.custom_vjp
def _with_gradient_of_its_own(context: jax.Array) -> jax.Array:
    """Return `context` unchanged.

    Kernels need the sum over channels of context times gradient. The product that makes the
    gradient of so many heads would take TPUs 2.7 times as long if XLA fused that sum with it.
    """
    return context


_with_gradient_of_its_own.defvjp(
    lambda context: (context, None),
    lambda _, gradient: (jax.lax.optimization_barrier(gradient),),
)
