"""Define what an attention function takes and returns, for the model, its kernels and wrappers.

Letters: B sequences, T tokens of a sequence, P queries of a part, H query heads, K key/value heads,
C channels of a query and key, V channels of a value; V = C except with latent attention.
"""

from typing import NamedTuple, Protocol

import jax


class AttentionOptions(NamedTuple):
    """What a layer's attention does besides causal attention; the defaults cost nothing.

    Attributes:
      window: tokens that a query sees, its own included, int32 scalar; None = all.
      sinks: [H], a logit per head that enters only the softmax's denominator.
      soft_cap: c of c * tanh(score / c); 0 = none.
    """

    window: int | jax.Array | None = None
    sinks: jax.Array | None = None
    soft_cap: float = 0.0


PLAIN = AttentionOptions()


class AttentionFn(Protocol):
    """Attention of all queries to earlier tokens of their segment."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        """Return the outputs, [B,T,H,V].

        Args:
          q, k, v: query [B,T,H,C], key [B,T,K,C], value [B,T,K,V].
          segment_ids: int32 [B,T].
          options: the layer's options.
        """
        ...


class PartAttention(Protocol):
    """Attention of the queries of one part to all keys."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        part: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        """Return the outputs of the part, [B,P,H,V].

        Args:
          q: queries of the part [B,P,H,C].
          k, v: key [B,T,K,C], value [B,T,K,V].
          segment_ids: int32 [B,T].
          part: index of the part, int32 scalar.
          options: the layer's options; a window counts tokens, not places.
        """
        ...


class OverLatents:
    """Attention that latent attention calls with latents, so that a cache need only hold latents.

    Keys then have one head, and values are their first V channels.
    """

    def __init__(self, attention: AttentionFn):
        self._attention = attention

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        return self._attention(q, k, v, segment_ids, options)
