"""AdamW (Loshchilov & Hutter 2019)."""

import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.optimizers import OPTIMIZERS


@OPTIMIZERS.register()
def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
