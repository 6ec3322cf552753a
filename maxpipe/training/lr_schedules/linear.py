"""A straight line down to the final fraction."""

import jax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.lr_schedules import LR_SCHEDULES


@LR_SCHEDULES.register()
def linear(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    return 1 - (1 - config.final_fraction) * progress
