"""AdamW (Loshchilov & Hutter 2019); moments are float32."""

import jax.numpy as jnp
import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.optimizers import OPTIMIZERS


@OPTIMIZERS.register()
def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=jnp.float32)
