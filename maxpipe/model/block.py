"""Define the decoder block of the Llama family: attention, then gated MLP, each after a norm."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import Attention, AttentionFn
from maxpipe.model.layers import GatedMLP, RMSNorm, SideInputs, dropout

# Numbers of the sublayers, folded into the layer's key: each draws dropout masks of its own.
ATTENTION = 0
MLP = 1


class LlamaBlock(nnx.Module):
    """One decoder layer (Touvron et al. 2023); qk-norm and attention bias make it Qwen's."""

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        self.rate = config.dropout
        norm = partial(RMSNorm, config.embed_dim, eps=config.norm_eps, dtype=config.param_dtype)
        self.attention_norm = norm()
        self.attention = Attention(config, attention)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config)

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Apply the layer.

        Args:
          x_BTD: activations [B, T, D].
          side: positions, segment ids and sequence indices.
          key: the layer's key of this step, or None without dropout.

        Returns:
          (activations [B, T, D], auxiliary loss summed over sequences, float32 scalar: 0 here).
        """
        # 1. x + attention(norm(x))
        with jax.named_scope("attention"):
            attended = self.attention(self.attention_norm(x_BTD), side.positions, side.segment_ids)
            x_BTD = x_BTD + self._drop(attended, key, ATTENTION, side)
        # 2. x + mlp(norm(x))
        with jax.named_scope("mlp"):
            x_BTD = x_BTD + self._drop(self.mlp(self.mlp_norm(x_BTD)), key, MLP, side)
        return x_BTD, jnp.float32(0)

    def _drop(
        self, x_BTD: jax.Array, key: jax.Array | None, sublayer: int, side: SideInputs
    ) -> jax.Array:
        if key is None or not self.rate:
            return x_BTD
        return dropout(x_BTD, self.rate, jax.random.fold_in(key, sublayer), side)
