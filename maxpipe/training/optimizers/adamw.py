"""AdamW (Loshchilov & Hutter 2019)."""

from typing import Any

import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.optimizers import OPTIMIZERS


@OPTIMIZERS.register()
def adamw(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
