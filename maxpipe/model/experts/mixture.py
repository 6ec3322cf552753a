"""Define the layer's mixture of experts: router, routed experts, and those that all tokens use.

Letters: B sequences, T tokens, N = B T, k experts of a token, P rows, E experts, D embed, F hidden
width of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.catalog import EXPERT_CHOICE
from maxpipe.config.sections import ModelConfig
from maxpipe.model.experts.blocks import Blocks
from maxpipe.model.experts.dispatch import Layout, Places, arrange, collect, spread
from maxpipe.model.experts.router import losses, route
from maxpipe.model.layers import ACTIVATIONS, EXPERT_LOAD, GatedMLP
from maxpipe.model.parameters import declare

LayoutFn = Callable[[int, int], Layout]
MultiplyFn = Callable[[jax.Array, jax.Array, Places, Layout], jax.Array]


class ExpertWeights(NamedTuple):
    """Weights of all experts: gate and up [E, D, F], down [E, F, D]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class ExpertsFn(Protocol):
    """The routed experts of one layer."""

    def __call__(
        self, x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        """Return the weighted sum of each token's experts, [B, T, D] in the dtype of `x`.

        Args:
          x: tokens [B, T, D].
          choice: int32 [B, T, k], the experts of each token.
          combine: float32 [B, T, k], their weights.
          weights: of all experts, in the dtype of `x`.
        """
        ...


def experts_with(layout_of: LayoutFn, multiply: MultiplyFn, activation: str) -> ExpertsFn:
    """Return the experts around a kernel's two functions, see `maxpipe.model.experts`."""

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        width, per_token, num_experts = x.shape[-1], choice.shape[-1], weights.gate.shape[0]
        # 1. Rows in the order of experts: [B, T, D] -> [P, D].
        layout = layout_of(choice.size, num_experts)
        places = arrange(choice.reshape(-1, per_token), num_experts, layout)
        rows = spread(x.reshape(-1, width), places)
        # 2. Each expert's MLP.
        gate = checkpoint_name(multiply(rows, weights.gate, places, layout), "mlp_gate")  # [P, F]
        up = checkpoint_name(multiply(rows, weights.up, places, layout), "mlp_up")
        hidden = ACTIVATIONS[activation](gate) * up
        down = checkpoint_name(multiply(hidden, weights.down, places, layout), "mlp_down")  # [P, D]
        # 3. The weighted sum of a token's rows, in float32: [P, D] -> [N, k, D] -> [B, T, D].
        outputs = collect(down, places).astype(jnp.float32)
        y = jnp.sum(outputs * combine.reshape(-1, per_token, 1), axis=1)
        return y.astype(x.dtype).reshape(x.shape)

    return run


class MixtureOfExperts(nnx.Module):
    """Routed experts, and shared ones next to them, in the place of an MLP.

    Args:
      config: the model's section of the configuration, with experts.
      experts: how routed experts are computed; on one device if None.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsFn | None = None):
        moe, dtype = config.moe, config.param_dtype
        E, D, F = moe.experts, config.embed_dim, config.expert_dim
        std, out_std = 1 / math.sqrt(D), 1 / math.sqrt(F * 2 * config.num_layers)
        self.config = moe
        self.experts = experts or experts_with(
            Blocks.layout, Blocks.multiply, config.mlp_activation
        )
        self.router = declare(
            (D, E), ("router", "router"), jnp.float32, stddev=std, keeps_dtype=True
        )
        self.has_bias = moe.has_bias
        if self.has_bias:
            self.bias = declare((E,), ("expert_bias",), jnp.float32, keeps_dtype=True)
        axes = ("expert", "expert_embed", "expert_mlp")
        self.gate = declare((E, D, F), axes, dtype, stddev=std)
        self.up = declare((E, D, F), axes, dtype, stddev=std)
        self.down = declare(
            (E, F, D), ("expert", "expert_mlp", "expert_embed"), dtype, stddev=out_std
        )
        self.has_shared = moe.shared_experts > 0
        if self.has_shared:
            self.shared = GatedMLP(replace(config, mlp_dim=moe.shared_experts * F))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the experts to each token, [B, T, D] -> ([B, T, D], losses by name).

        The losses are those of `router.losses`; next to them is `EXPERT_LOAD`, float32 [E].
        """
        # 1. Choose, in float32. A product of so few columns costs little in full precision.
        logits = jnp.matmul(
            x_BTD.astype(jnp.float32), self.router[...], precision=lax.Precision.HIGHEST
        )
        choice = route(logits, self.config, self.bias[...] if self.has_bias else None)
        experts = checkpoint_name(choice.experts, EXPERT_CHOICE)  # [B, T, k]
        # 2. Compute.
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...])
        y = self.experts(x_BTD, experts, choice.weights, weights)
        if self.has_shared:
            y = y + self.shared(x_BTD)
        chosen = jax.nn.one_hot(experts, self.config.experts, dtype=jnp.float32)  # [B, T, k, E]
        load = {EXPERT_LOAD: jnp.sum(chosen, axis=(0, 1, 2))}
        return y, losses(logits, choice._replace(experts=experts), self.config) | load
