"""A Llama block with an auxiliary loss per sequence, like that of routed experts, for tests."""

import jax
import jax.numpy as jnp

from maxpipe.model.block import LlamaBlock
from maxpipe.model.layers import SideInputs


class BalancedBlock(LlamaBlock):
    """Add log(1 + mean square of the output) of each sequence to the loss."""

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        y, _ = super().__call__(x_BTD, side, key)
        mean_square = jnp.mean(jnp.square(y.astype(jnp.float32)), axis=(1, 2))  # [B]
        return y, {"size_loss": jnp.sum(jnp.log1p(mean_square))}
