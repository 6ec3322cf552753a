"""Falls with the square root of the steps since the start (Vaswani et al. 2017), down to the final fraction."""

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.lr_schedules import LR_SCHEDULES


@LR_SCHEDULES.register()
def inverse_sqrt(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    warmup = max(config.warmup_steps, 1)
    step = warmup + progress * max(config.decay_steps - config.warmup_steps, 1)
    return jnp.maximum(jnp.sqrt(warmup / step), config.final_fraction)
