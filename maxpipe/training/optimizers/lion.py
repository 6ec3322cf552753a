"""Lion (Chen et al. 2023): the sign of a momentum; takes a third to a tenth of AdamW's learning rate."""

from typing import Any

import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.training.optimizers import OPTIMIZERS


@OPTIMIZERS.register()
def lion(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.beta1, config.beta2)
