"""Attend with two matrix products with the full [T, T] matrix between them; runs everywhere.

Shapes: B batch, T sequence, P queries of a part, H query heads, K key/value heads, G = H / K,
C channels of a query and key, V of a value.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import ModelConfig
from maxpipe.sharding.attention_contract import (
    PLAIN,
    Attended,
    AttentionFn,
    AttentionOptions,
    Keys,
    PartAttention,
    PartToPart,
    Queries,
)


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    options: AttentionOptions = PLAIN,
) -> jax.Array:
    """Attend to earlier tokens of the same segment, see `AttentionFn`."""
    same_segment = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # [B, 1, T, T]
    is_plain = options.window is None and options.sinks is None and not options.soft_cap
    if is_plain and v.shape[3] == q.shape[3]:
        return jax.nn.dot_product_attention(q, k, v, mask=same_segment, is_causal=True)
    tokens = jnp.arange(q.shape[1])
    mask = same_segment & visible(tokens, tokens, options.window)
    return attend(q, k, v, mask, sinks=options.sinks, soft_cap=options.soft_cap)


def attention_of_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    tokens: jax.Array,
    options: AttentionOptions = PLAIN,
) -> jax.Array:
    """Compute `dot_product_attention` for the queries of `tokens`, int32 [P]; q is [B,P,H,C]."""
    # [B, 1, P, T]
    same_segment = segment_ids[:, tokens][:, None, :, None] == segment_ids[:, None, None, :]
    mask = same_segment & visible(tokens, jnp.arange(k.shape[1]), options.window)
    return attend(q, k, v, mask, sinks=options.sinks, soft_cap=options.soft_cap)


def visible(queries: jax.Array, keys: jax.Array, window: int | jax.Array | None) -> jax.Array:
    """Return which keys [T] each query [P] sees by their positions, int32: bool [P, T]."""
    not_later = queries[:, None] >= keys
    return not_later if window is None else not_later & (queries[:, None] - keys < window)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    sinks: jax.Array | None = None,
    soft_cap: float = 0.0,
) -> jax.Array:
    """Attend to the keys that a mask admits, at least one for every query: [B,P,H,V].

    Args:
      q, k, v: query [B,P,H,C], key [B,T,K,C], value [B,T,K,V].
      mask: bool, broadcastable to [B,1,P,T].
      sinks, soft_cap: see `AttentionOptions`.
    """
    if sinks is None and not soft_cap and v.shape[3] == q.shape[3]:
        return jax.nn.dot_product_attention(q, k, v, mask=mask)
    num_kv_heads = k.shape[2]
    grouped = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[3])  # [B, P, K, G, C]
    # [B, K, G, P, T], in float32: the softmax of bfloat16 scores is too coarse.
    scores = jnp.einsum("bpkgc,btkc->bkgpt", grouped, k, preferred_element_type=jnp.float32)
    scores /= math.sqrt(q.shape[3])
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # The mask has one dimension for heads, the scores have two.
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)  # [B, K, G, P, 1]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)  # [K, G, 1, 1]
        log_z = jnp.logaddexp(log_z, sink)
    weights = jnp.exp(scores - log_z).astype(v.dtype)
    context = jnp.einsum("bkgpt,btkv->bpkgv", weights, v)
    # [B, P, K, G, V] -> [B, P, H, V]
    return context.reshape(*q.shape[:3], v.shape[3])


class _PartToPart:
    """See `attention_contract.PartToPart`."""

    @staticmethod
    def forward(queries: Queries, keys: Keys, is_earlier: jax.Array | None) -> Attended:
        scores = _masked_scores(queries, keys, is_earlier)
        log_z = jax.nn.logsumexp(scores, axis=-1)
        out, _ = _weighted(scores, log_z, keys.v)
        return Attended(out, log_z.reshape(queries.q.shape[:3]))

    @staticmethod
    def backward(
        queries: Queries,
        keys: Keys,
        attended: Attended,
        gradient: jax.Array,
        is_earlier: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            own, others = queries._replace(q=q), keys._replace(k=k, v=v)
            scores = _masked_scores(own, others, is_earlier)
            return _weighted(scores, attended.logsumexp.reshape(scores.shape[:-1]), v)

        # A score has a share in the output, and one in the sum that divides it.
        of_sum = -jnp.sum(attended.out.astype(jnp.float32) * gradient, axis=-1)
        _, differentiate = jax.vjp(attend, queries.q, keys.k, keys.v)
        return tuple(differentiate((gradient, of_sum)))


def _weighted(scores: jax.Array, log_z: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return values [B,H,P,V] weighted by scores [B,K,G,P,P], and the sums of weights [B,H,P]."""
    weights = jnp.exp(scores - log_z[..., None])
    out = jnp.einsum("bkgpt,bktv->bkgpv", weights.astype(v.dtype), v)
    of_heads = scores.shape[0], -1, scores.shape[3]
    return out.reshape(*of_heads, v.shape[3]), weights.sum(axis=-1).reshape(of_heads)


def _masked_scores(queries: Queries, keys: Keys, is_earlier: jax.Array | None) -> jax.Array:
    """Return the scores between two parts in float32, [B,K,G,P,P]."""
    (q, segments), (k, _, key_segments) = queries, keys
    grouped = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])  # [B, K, G, P, C]
    scores = jnp.einsum("bkgpc,bktc->bkgpt", grouped, k, preferred_element_type=jnp.float32)
    place = jnp.arange(k.shape[2])
    is_late = place >= k.shape[2] // 2
    if is_earlier is None:
        seen = visible(place, place, None)
    else:
        seen = jnp.where(is_earlier, ~is_late[None], is_late[:, None])  # [P, P]
    mask = seen & (segments[:, :, None] == key_segments[:, None])  # [B, P, P]
    return jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)


class DotProduct:
    """The kernel for every backend: two matrix products as XLA compiles them."""

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int) -> AttentionFn:
        return dot_product_attention

    @staticmethod
    def build_for_parts(config: ModelConfig, parts: np.ndarray) -> PartAttention:
        def attention(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segment_ids: jax.Array,
            part: jax.Array,
            options: AttentionOptions = PLAIN,
        ) -> jax.Array:
            tokens = jnp.asarray(parts)[part]
            return attention_of_queries(q, k, v, segment_ids, tokens, options)

        return attention

    @staticmethod
    def build_for_ring(config: ModelConfig, length: int) -> PartToPart:
        return _PartToPart()
