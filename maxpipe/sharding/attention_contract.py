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


class Queries(NamedTuple):
    """Queries of a part [B,H,P,C], with the factor of scores in them, and segment ids [B,P]."""

    q: jax.Array
    segments: jax.Array


class Keys(NamedTuple):
    """Keys of a part [B,K,P,C], values [B,K,P,V] and segment ids [B,P]."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array


class Attended(NamedTuple):
    """Output [B,H,P,V], and logsumexps of scores, float32 [B,H,P]."""

    out: jax.Array
    logsumexp: jax.Array


class PartToPart(Protocol):
    """Attention of the queries of a part to the keys of a part, whose results a ring merges.

    A part is the two chunks of a sequence that a device has, see `context_parallel`. If queries and
    keys are of the same part, `is_earlier` is None, and queries see no later keys. Otherwise it
    says whether the keys' device is the earlier one. Then all queries see the first half of the
    keys, else the second half of the queries see all keys. Queries see only keys of their segment.
    """

    def forward(self, queries: Queries, keys: Keys, is_earlier: jax.Array | None) -> Attended:
        """Attend. A query that sees no key has any output, and a logsumexp whose exp is zero."""
        ...

    def backward(
        self,
        queries: Queries,
        keys: Keys,
        attended: Attended,
        gradient: jax.Array,
        is_earlier: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        """Return what these keys add to the gradients of q, k and v, given attention to all."""
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
