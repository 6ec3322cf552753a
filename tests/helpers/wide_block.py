"""A block with more products and parameters than the Llama block has, for tests of the planner."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn
from maxpipe.model.block import LlamaBlock
from maxpipe.model.layers import GatedMLP, RMSNorm, SideInputs, project
from maxpipe.model.parameters import declare


class WideBlock(LlamaBlock):
    """The Llama block with a second MLP, and an ungated layer of four times the width after it."""

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        super().__init__(config, attention)
        width = config.embed_dim
        self.second_norm = RMSNorm(width, eps=config.norm_eps, dtype=config.param_dtype)
        self.second_mlp = GatedMLP(config)
        self.wide_in = declare((width, 4 * width), ("embed", "mlp"), config.param_dtype, stddev=0.1)
        self.wide_out = declare(
            (4 * width, width), ("mlp", "embed"), config.param_dtype, stddev=0.1
        )

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        x_BTD, auxiliary = super().__call__(x_BTD, side, key)
        x_BTD = x_BTD + self.second_mlp(self.second_norm(x_BTD))
        wide = checkpoint_name(project(x_BTD, self.wide_in[...]), "wide")
        return x_BTD + project(nnx.silu(wide), self.wide_out[...]), auxiliary
