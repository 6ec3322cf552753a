"""Warm-up, stable, decay: the peak rate, then a straight line down over the last part (Hu et al. 2024)."""

import jax
import jax.numpy as jnp

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.lr_schedules import LR_SCHEDULES


@LR_SCHEDULES.register()
def wsd(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    decayed = jnp.maximum(progress - config.stable_fraction, 0) / max(1 - config.stable_fraction, 1e-6)
    return 1 - (1 - config.final_fraction) * decayed
