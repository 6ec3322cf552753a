"""Drawing the next token from logits. Shapes: B sequences, V vocabulary."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: only so many of the likeliest tokens are drawn; 0 = all.
      top_p: only the likeliest tokens that together have this probability are drawn (nucleus
        sampling, Holtzman et al. 2020); 1 = all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        assert self.temperature >= 0, self
        assert self.top_k >= 0, self
        assert 0 < self.top_p <= 1, self

    def __call__(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Logits float32 [B,V] -> token ids int32 [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            logits = jnp.where(logits < self._least_of_nucleus(logits), -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    def _least_of_nucleus(self, logits: jax.Array) -> jax.Array:
        """The smallest logit of the nucleus, [B,1]."""
        ordered = -jnp.sort(-logits, axis=-1)
        probability = jax.nn.softmax(ordered, axis=-1)
        likelier = jnp.cumsum(probability, axis=-1) - probability
        return jnp.min(jnp.where(likelier < self.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
