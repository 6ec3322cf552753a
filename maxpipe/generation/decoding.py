"""Decoding: what the model says next, with the keys and values of earlier tokens kept.

Attention is a parameter of the model, so that whatever block it has, a function that also keeps
what it is given makes a cache of it. Shapes: B sequences, P tokens of the prompt, W window, N
layers, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxpipe.config.sections import ModelConfig
from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.model.layers import SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram

KeysValues = tuple[jax.Array, jax.Array]  # [B,W,K,C] of one layer, [N,B,W,K,C] of all
# (query, key, value, what the layer kept before) -> (context, what it keeps now)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, KeysValues]]


class Decoder:
    """A model of known layers that goes through a text once.

    Token number p lies in slot p % W of the cache: a token sees the W newest, itself included.
    Parameters are {"embed", "layers" [N, ...], "head"} with floating leaves in the compute dtype.

    Args:
      config: the model's section of the configuration.
      window: W. Training knows no distance of tokens beyond its sequence length.
    """

    def __init__(self, config: ModelConfig, window: int):
        self._config = config
        self._window = window
        self._program = ModelProgram(config)

    def prefill(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Reads a prompt.

        Args:
          params: of all layers.
          tokens: int32 [B,P], P at most W.

        Returns:
          (logits of the token after the prompt, float32 [B,V]; cache).
        """
        length = tokens.shape[1]
        assert 0 < length <= self._window

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, _: Any
        ) -> tuple[jax.Array, KeysValues]:
            room = ((0, 0), (0, self._window - length), (0, 0), (0, 0))
            return dot_product_attention(q, k, v, jnp.ones_like(tokens)), (
                jnp.pad(k, room),
                jnp.pad(v, room),
            )

        return self._run(params, tokens, jnp.zeros((), jnp.int32), attend, None)

    def step(
        self, params: Params, token: jax.Array, position: jax.Array, cache: KeysValues
    ) -> tuple[jax.Array, KeysValues]:
        """Reads one more token.

        Args:
          params: of all layers.
          token: int32 [B].
          position: int32 scalar, its number in the sequence.
          cache: of the tokens before it.

        Returns:
          (logits of the token after it, float32 [B,V]; cache).
        """
        slot = position % self._window
        # Slots fill in order, and from then on all are in use.
        in_use = (jnp.arange(self._window) <= position)[None, None, None]

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, kept: Any
        ) -> tuple[jax.Array, KeysValues]:
            keys = jax.lax.dynamic_update_slice_in_dim(kept[0], k, slot, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(kept[1], v, slot, axis=1)
            return jax.nn.dot_product_attention(q, keys, values, mask=in_use), (keys, values)

        return self._run(params, token[:, None], position, attend, cache)

    def _run(
        self,
        params: Params,
        tokens: jax.Array,
        start: jax.Array,
        attend: Attend,
        cache: KeysValues | None,
    ) -> tuple[jax.Array, KeysValues]:
        """Tokens [B,T] from position `start` on -> (logits after the last one, cache)."""
        rows, length = tokens.shape
        side = SideInputs(
            positions=jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), tokens.shape),
            segment_ids=jnp.ones_like(tokens),
            sequence_index=jnp.arange(rows, dtype=jnp.int32),
        )

        def layer(x: jax.Array, inputs: tuple[Params, Any]) -> tuple[jax.Array, KeysValues]:
            weights, before = inputs
            caught: list[KeysValues] = []

            def attention(q: jax.Array, k: jax.Array, v: jax.Array, _: jax.Array) -> jax.Array:
                context, now = attend(q, k, v, before)
                caught.append(now)
                return context

            x, _ = ModelProgram(self._config, attention).block(weights, x, side, None)
            (now,) = caught
            return x, now

        x, kept = jax.lax.scan(
            layer, self._program.embed(params, tokens), (params["layers"], cache)
        )
        return self._program.logits(params, x[:, -1]), kept
