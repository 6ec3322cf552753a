"""The Llama block with an auxiliary loss per sequence, as routed experts have one; for tests of engines."""

import jax.numpy as jnp

from maxpipe.model.block import LlamaBlock


class BalancedBlock(LlamaBlock):
    """Adds up log(1 + mean square of the output) of every sequence."""

    def __call__(self, x_BTD, side, key):
        y, _ = super().__call__(x_BTD, side, key)
        mean_square = jnp.mean(jnp.square(y.astype(jnp.float32)), axis=(1, 2))
        return y, jnp.sum(jnp.log1p(mean_square))
