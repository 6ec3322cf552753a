"""Define the layer's mixture of experts: router, routed experts, and shared experts.

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
from maxpipe.model.experts.capacity import LayoutFn, layout_for, within_capacity
from maxpipe.model.experts.dispatch import (
    Layout,
    Places,
    add_bias,
    add_up,
    arrange,
    by_row,
    spread,
    spread_twice,
)
from maxpipe.model.experts.router import assignments, losses, route
from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD, GatedMLP, GatingFn, gating
from maxpipe.model.parameters import declare

MultiplyFn = Callable[[jax.Array, jax.Array, Places, Layout], jax.Array]


class ExpertWeights(NamedTuple):
    """Weights of all experts: gate and up [E, D, F], down [E, F, D].

    Their biases are [E, F], [E, F] and [E, D], all three or none.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class ExpertsFn(Protocol):
    """The routed experts of one layer."""

    def __call__(
        self, x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        """Return the weighted sum of each token's experts, [B, T, D] in the dtype of `x`.

        Args:
          x: tokens [B, T, D].
          choice: int32 [B, T, k], the experts of each token; E for none.
          combine: float32 [B, T, k], their weights.
          weights: weights of all experts, in the dtype of `x`.
        """
        ...


def experts_with(layout_of: LayoutFn, multiply: MultiplyFn, gate_up: GatingFn) -> ExpertsFn:
    """Return the experts built on a kernel's two functions, see `maxpipe.model.experts`.

    Args:
      layout_of, multiply: the kernel's functions.
      gate_up: function from `maxpipe.model.layers.gating`.
    """

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        width, per_token, num_experts = x.shape[-1], choice.shape[-1], weights.gate.shape[0]
        # 1. Rows in the order of experts: [B, T, D] -> [P, D].
        layout = layout_of(choice.shape, num_experts)
        places = arrange(choice.reshape(-1, per_token), num_experts, layout)
        tokens = x.reshape(-1, width)
        if layout.missing == "none":
            to_gate, to_up = spread_twice(tokens, places)
        else:
            to_gate = to_up = spread(tokens, places, layout.missing)
        of_row = jnp.take(choice, places.assignments, mode="fill", fill_value=num_experts)  # [P]

        def project(rows: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> jax.Array:
            product = multiply(rows, matrix, places, layout)
            return product if bias is None else add_bias(product, bias, of_row)

        def weighted(rows: jax.Array) -> jax.Array:
            of_rows = by_row(combine.reshape(-1, per_token), places)  # [P]
            return (rows.astype(jnp.float32) * of_rows[:, None]).astype(rows.dtype)

        # 2. Each expert's MLP.
        gate = checkpoint_name(
            project(to_gate, weights.gate, weights.gate_bias), "mlp_gate"
        )  # [P, F]
        up = checkpoint_name(project(to_up, weights.up, weights.up_bias), "mlp_up")
        # Rows are weighted where they are narrow, unless a bias is added later.
        hidden = gate_up(gate, up)
        if weights.down_bias is None:
            hidden = weighted(hidden)
        down = project(hidden, weights.down, weights.down_bias)  # [P, D]
        if weights.down_bias is not None:
            down = weighted(checkpoint_name(down, "mlp_down"))
        # 3. The sum of a token's rows: [P, D] -> [N, D] -> [B, T, D].
        return add_up(down, places, layout.missing).reshape(x.shape)

    return run


class MixtureOfExperts(nnx.Module):
    """Routed experts, and shared ones if configured, in place of an MLP.

    Args:
      config: the model's section of the configuration, with experts.
      experts: function that computes routed experts; None computes them on one device.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsFn | None = None):
        moe, dtype = config.moe, config.param_dtype
        E, D, F = moe.experts, config.embed_dim, config.expert_dim
        std, out_std = 1 / math.sqrt(D), 1 / math.sqrt(F * 2 * config.num_layers)
        self.config = moe
        layout = layout_for(Blocks.layout, moe)
        self.experts = experts or experts_with(layout, Blocks.multiply, gating(config))
        self.router = declare(
            (D, E), ("router", "router"), jnp.float32, stddev=std, keeps_dtype=True
        )
        self.has_selection_bias = moe.has_bias
        if moe.has_bias:
            self.bias = declare((E,), ("expert_bias",), jnp.float32, keeps_dtype=True)
        axes = ("expert", "expert_embed", "expert_mlp")
        self.gate = declare((E, D, F), axes, dtype, stddev=std)
        self.up = declare((E, D, F), axes, dtype, stddev=std)
        self.down = declare(
            (E, F, D), ("expert", "expert_mlp", "expert_embed"), dtype, stddev=out_std
        )
        self.has_logit_bias = moe.logit_bias
        if moe.logit_bias:
            self.logit_bias = declare((E,), ("norm",), jnp.float32, keeps_dtype=True)
        self.has_bias = config.mlp_bias
        if config.mlp_bias:
            self.gate_bias = declare((E, F), ("expert", "expert_mlp"), dtype)
            self.up_bias = declare((E, F), ("expert", "expert_mlp"), dtype)
            self.down_bias = declare((E, D), ("expert", "norm"), dtype)
        self.has_shared = moe.shared_experts > 0
        if self.has_shared:
            self.shared = GatedMLP(replace(config.base, mlp_dim=moe.shared_experts * F))

    def __call__(
        self, x_BTD: jax.Array, is_token: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the experts to each token, [B, T, D] -> ([B, T, D], losses by name).

        The losses come from `router.losses`; added to them are `EXPERT_LOAD`, float32 [E], and
        with a capacity `EXPERT_DROPS`. None of them counts padding.

        Args:
          x_BTD: tokens.
          is_token: bool [B, T], False for padding.
        """
        # 1. Choose, in float32. A product with so few columns costs little in full precision.
        logits = jnp.matmul(
            x_BTD.astype(jnp.float32), self.router[...], precision=lax.Precision.HIGHEST
        )
        if self.has_logit_bias:
            logits = logits + self.logit_bias[...]
        selection_bias = self.bias[...] if self.has_selection_bias else None
        choice = route(logits, self.config, selection_bias)
        experts = checkpoint_name(choice.experts, EXPERT_CHOICE)  # [B, T, k]
        # 2. Compute.
        weights = ExpertWeights(self.gate[...], self.up[...], self.down[...])
        if self.has_bias:
            biases = self.gate_bias[...], self.up_bias[...], self.down_bias[...]
            weights = ExpertWeights(*weights[:3], *biases)
        kept = within_capacity(experts, self.config)
        y = self.experts(x_BTD, kept, choice.weights, weights)
        if not self.has_bias:  # else the router's gradient needs the rows
            y = checkpoint_name(y, "mlp_down")
        if self.has_shared:
            y = y + self.shared(x_BTD)
        load = assignments(experts, is_token, self.config.experts)  # [B, E]
        counts = {EXPERT_LOAD: jnp.sum(load, axis=0)}
        if self.config.capacity_factor:
            dropped = (kept != experts) & is_token[..., None]
            counts[EXPERT_DROPS] = jnp.sum(dropped, dtype=jnp.float32)
        choice = choice._replace(experts=experts)
        return y, losses(logits, choice, is_token, self.config) | counts
