"""Compute the times of units from FLOPs: what a stage with some number of layers takes.

Counted are products with weights, and attention, of which a causal query does half. The backward of
a product with weights is one for its input and one for its weight; that of attention belongs to the
input gradient.

Left out are norms, softmax, rotations and activation functions, a per cent or two of the FLOPs at
real widths, and the embedding: a lookup in the forward, and in the backward a sum that moves bytes
and multiplies nothing. A chunk that is recomputed as a whole need not repeat its very last product,
which is counted here. The kernel that runs without accelerators computes attention's masked half
too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maxpipe.config.sections import Config
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.pipeline.schedules.table import Table
from maxpipe.planning.footprint import layer_of
from maxpipe.planning.layer_trace import trace_model
from maxpipe.planning.simulate import Costs


@dataclass(frozen=True)
class UnitTimes:
    """Times for one microbatch, in units of the forward of one layer.

    Attributes:
      input_gradient: of a layer, with what it computes again.
      weight_gradient: of a layer.
      head: loss and its gradient.
    """

    input_gradient: float
    weight_gradient: float
    head: float

    @property
    def layer(self) -> float:
        """Return the time of forward and backward of one layer."""
        return 1.0 + self.input_gradient + self.weight_gradient

    def costs(self, sizes: Sequence[int], table: Table) -> Costs:
        """Return the costs of a table whose global chunks have so many layers."""
        layers = np.asarray(sizes, float)
        assert layers.shape == (table.num_chunks,)
        return Costs(
            forward=layers.tolist(),
            backward=((self.input_gradient + self.weight_gradient) * layers).tolist(),
            input_gradient=(self.input_gradient * layers).tolist(),
            weight_gradient=(self.weight_gradient * layers).tolist(),
            head=self.head,
        )


def unit_times(config: Config) -> UnitTimes:
    """Compute the times of a layer and of the head for a resolved configuration."""
    layer = layer_of(config)
    forward = layer.weight_flops + layer.activation_flops
    input_gradient = layer.weight_flops + 2 * layer.activation_flops + _recomputed_flops(config)
    head = trace_model(config.model, config.data.sequence_length).head_flops
    return UnitTimes(
        input_gradient=input_gradient / forward,
        weight_gradient=layer.weight_flops / forward,
        # Its forward, and the gradients for its input and its weight.
        head=3 * head / forward,
    )


def _recomputed_flops(config: Config) -> float:
    """Return the FLOPs per token that a layer's backward recomputes, see `pipeline.remat`."""
    pipeline = config.pipeline
    policy = remat_policy(pipeline)
    if policy.everything:
        return 0.0
    passes = pipeline.remat_iterations + pipeline.remat_layers
    return passes * layer_of(config).recomputed_flops((*policy.device, *policy.host))
