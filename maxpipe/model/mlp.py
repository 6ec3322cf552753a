"""Gated MLP (SwiGLU, Shazeer 2020). Shapes: B batch, T sequence, D embed, F hidden."""

import math

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig
from maxpipe.model.parameters import declare
from maxpipe.model.projection import project


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        std, out_std = 1 / math.sqrt(D), 1 / math.sqrt(F * 2 * config.num_layers)
        self.gate = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.up = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.down = declare((F, D), ("mlp", "embed"), dtype, stddev=out_std)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B,T,D] -> [B,T,D]."""
        gate = checkpoint_name(project(x_BTD, self.gate[...]), "mlp_gate")
        up = checkpoint_name(project(x_BTD, self.up[...]), "mlp_up")
        hidden = jax.nn.silu(gate) * up
        return checkpoint_name(project(hidden, self.down[...]), "mlp_down")
