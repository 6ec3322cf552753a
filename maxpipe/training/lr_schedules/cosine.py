"""Half a cosine down to the final fraction (Loshchilov & Hutter 2017)."""

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.lr_schedules import LR_SCHEDULES


@LR_SCHEDULES.register()
def cosine(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    return config.final_fraction + (1 - config.final_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
