"""Stochastic gradient descent with momentum beta1; beta1 = 0 keeps no state."""

from typing import Any

import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.optimizers import OPTIMIZERS


@OPTIMIZERS.register()
def sgd(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    return optax.trace(config.beta1) if config.beta1 else optax.identity()
