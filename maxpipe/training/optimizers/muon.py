"""Muon (Jordan 2024): the momentum of each matrix made orthogonal; AdamW for embeddings, head, norms and biases.

Updates of matrices have the root mean square of AdamW's, so that both share learning rate and weight decay (Liu et al.
2025, "Muon is Scalable for LLM Training").
"""

import math
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.parameters import ParamSpec
from maxpipe.training.optimizers import OPTIMIZERS
from maxpipe.training.optimizers._layers import per_layer

RMS_OF_ADAMW = 0.2
MOMENTUM = 0.95


@OPTIMIZERS.register()
def muon(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    def make(spec: ParamSpec) -> optax.GradientTransformation:
        dimensions = matrix_dimensions(spec)
        if dimensions is None:
            return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        sides = (math.prod(spec.shape[i] for i in axes) for axes in dimensions)
        return optax.chain(
            scale_by_muon(beta=MOMENTUM, weight_dimension_numbers=MuonDimensionNumbers(*dimensions)),
            # An orthogonal matrix of sides m <= n has the root mean square 1 / sqrt(n).
            optax.scale(RMS_OF_ADAMW * math.sqrt(max(sides))),
        )

    return per_layer(make, specs)


def matrix_dimensions(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Dimensions of a layer's parameter over which it sums and which it gives out; None if it is no matrix.

    A matrix leads from the residual stream or back to it: `embed` is one side, the other dimensions are the other.
    Experts are matrices by themselves.
    """
    sides = [i for i, axis in enumerate(spec.axes) if axis != "expert"]
    if "embed" not in spec.axes or len(sides) < 2:
        return None
    embed = spec.axes.index("embed")
    others = tuple(i for i in sides if i != embed)
    return ((embed,), others) if embed == sides[0] else (others, (embed,))
