"""Define the decoder block: attention, then MLP or experts, in residual branches with norms."""

from functools import partial

import jax
from flax import nnx
from jax.experimental.layout import with_layout_constraint

from maxpipe.config.sections import ModelConfig
from maxpipe.config.sections.model_parts import PROJECTIONS
from maxpipe.model.attention import Attention, AttentionFn
from maxpipe.model.experts.mixture import ExpertsFn, MixtureOfExperts
from maxpipe.model.latent_attention import LatentAttention
from maxpipe.model.layers import (
    ROW_MAJOR,
    AuxiliaryLosses,
    DropFn,
    GatedMLP,
    RMSNorm,
    SideInputs,
    dropout,
)

# Numbers of the sublayers, folded into the layer's key: each draws dropout masks of its own.
ATTENTION = 0
MLP = 1
ADAPTERS = 2  # number of the first of `PROJECTIONS`


class LlamaBlock(nnx.Module):
    """One decoder layer (Touvron et al. 2023); options of `model.*` turn it into other families'.

    With `norm_placement` pre the norms come before attention and MLP, with post after them, inside
    the residual branch, with sandwich in both places. With `model.moe.experts` there is a mixture
    of experts in place of the MLP.
    """

    def __init__(
        self, config: ModelConfig, attention: AttentionFn, experts: ExpertsFn | None = None
    ):
        self.rate = config.dropout
        self.adapter_rate = config.lora.dropout if config.adapted else 0.0
        self.residual_scale = config.residual_scale
        self.placement = config.norm_placement
        self.is_row_major = config.gating == "separate"
        norm = partial(
            RMSNorm,
            config.embed_dim,
            eps=config.norm_eps,
            dtype=config.param_dtype,
            offset=config.norm_offset,
        )
        if self.placement != "post":
            self.attention_norm = norm()
        attention_sublayer = LatentAttention if config.is_latent else Attention
        self.attention = attention_sublayer(config, attention)
        if self.placement != "pre":
            self.attention_post_norm = norm()
        if self.placement != "post":
            self.mlp_norm = norm()
        self.has_experts = config.moe.experts > 0
        if self.has_experts:
            self.moe = MixtureOfExperts(config, experts)
        else:
            self.mlp = GatedMLP(config)
        if self.placement != "pre":
            self.mlp_post_norm = norm()

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply the layer.

        Args:
          x_BTD: activations [B, T, D].
          side: positions, segment ids, sequence indices and the layer's index.
          key: the layer's key for this step, or None without dropout.

        Returns:
          (activations [B, T, D], auxiliary losses by name, float32 scalars summed over sequences).
        """
        drop = self._adapter_drop(key, side)
        # 1. x + attention(norm(x))
        with jax.named_scope("attention"):
            normed = x_BTD if self.placement == "post" else self.attention_norm(x_BTD)
            y = self.attention(normed, side.positions, side.segment_ids, side.layer_index, drop)
            if self.placement != "pre":
                y = self.attention_post_norm(y)
            x_BTD = self._add(x_BTD, y, key, ATTENTION, side)
        # 2. x + mlp(norm(x)), or experts in its place
        with jax.named_scope("mlp"):
            normed = x_BTD if self.placement == "post" else self.mlp_norm(x_BTD)
            auxiliary: AuxiliaryLosses = {}
            if self.has_experts:
                y, auxiliary = self.moe(normed, side.segment_ids > 0)
            else:
                y = self.mlp(normed, drop)
            if self.placement != "pre":
                y = self.mlp_post_norm(y)
            x_BTD = self._add(x_BTD, y, key, MLP, side)
        return x_BTD, auxiliary

    def _add(
        self, x: jax.Array, y: jax.Array, key: jax.Array | None, sublayer: int, side: SideInputs
    ) -> jax.Array:
        """Add a sublayer's output to the residual stream, after scale and dropout."""
        y = y if self.residual_scale == 1 else y * self.residual_scale
        x += self._drop(y, key, sublayer, side)
        # Otherwise XLA may give the stream the layout in which attention leaves it, tokens
        # innermost, above all with one sequence a device, and TPUs transpose it for other products.
        # Only in programs that are split by hand: the partitioner may gather what is constrained.
        is_split = self.is_row_major and jax.sharding.get_abstract_mesh().manual_axes
        return with_layout_constraint(x, ROW_MAJOR) if is_split else x

    def _adapter_drop(self, key: jax.Array | None, side: SideInputs) -> DropFn | None:
        """Return dropout on the inputs of adapters, each with a mask of its own; None without."""
        if key is None or not self.adapter_rate:
            return None

        def drop(x: jax.Array, name: str) -> jax.Array:
            number = ADAPTERS + PROJECTIONS.index(name)
            return dropout(x, self.adapter_rate, jax.random.fold_in(key, number), side)

        return drop

    def _drop(
        self, x_BTD: jax.Array, key: jax.Array | None, sublayer: int, side: SideInputs
    ) -> jax.Array:
        if key is None or not self.rate:
            return x_BTD
        return dropout(x_BTD, self.rate, jax.random.fold_in(key, sublayer), side)
