"""Adafactor (Shazeer & Stern 2018): second moments of a matrix as one row and one column.

Updates are clipped to a root mean square of 1 and scaled by that of the parameter, so that learning rates are relative
to the size of parameters: 1e-2 is usual. No first moment; the decay of the second grows with the steps.
"""

from typing import Any

import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.parameters import ParamSpec
from maxpipe.training.optimizers import OPTIMIZERS
from maxpipe.training.optimizers._layers import per_layer

LEAST_FACTORED = 128  # smaller matrices keep all their second moments


@OPTIMIZERS.register()
def adafactor(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    def make(spec: ParamSpec) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=LEAST_FACTORED),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )

    return per_layer(make, specs)
