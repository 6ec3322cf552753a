"""The peak rate throughout."""

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.lr_schedules import LR_SCHEDULES


@LR_SCHEDULES.register()
def constant(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    return jnp.ones_like(progress)
