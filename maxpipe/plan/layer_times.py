"""Compute the times of units from FLOPs: how long a stage with some number of layers takes.

These are FLOPs of products with weights, and of attention, of which a causal query does half. The
backward of a product with weights is one product for its input and one for its weight; attention's
backward belongs to the input gradient.

They leave out norms, softmax, rotations and activation functions, a per cent or two of the FLOPs at
real widths, and the embedding, a lookup. A chunk that is recomputed as a whole need not repeat its
very last product, which is counted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.model.layer_facts import is_local
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.pipeline.layout import layers_in_chunks
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.device_parameters import with_dense_layers
from maxpipe.plan.flops import adapter_flops
from maxpipe.plan.footprint import layer_of
from maxpipe.plan.layer_trace import trace_model
from maxpipe.plan.simulate import Costs


class FirstLayers(NamedTuple):
    """Times of all first dense layers together, in units of the forward of one other layer."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


@dataclass(frozen=True)
class LayerTimes:
    """Times for one microbatch, in units of the forward of one layer."""

    input_gradient: float  # of a layer on average, with what it recomputes
    weight_gradient: float  # of a layer
    head: float  # loss and its gradient
    # For each layer in a chunk, in model order, what its forward and its input gradient take above
    # the average; empty if layers are alike.
    extras: tuple[tuple[float, float], ...]
    # Which the units of the first chunk run before their own; 0 where all stages share them.
    first: FirstLayers

    @property
    def layer(self) -> float:
        """Return the time of forward and backward of one layer on average."""
        return 1.0 + self.input_gradient + self.weight_gradient

    def of_layers(self, first: int, count: int) -> float:
        """Return the time of forward and backward of some layers, one after another."""
        return self.layer * count + sum(map(sum, self.extras[first : first + count]))

    def costs(self, sizes: Sequence[int], table: Table) -> Costs:
        """Return the costs of a table whose global chunks have so many layers."""
        assert len(sizes) == table.num_chunks
        # Float [3, chunks]: F, I and W.
        times = np.outer([1.0, self.input_gradient, self.weight_gradient], sizes)
        if self.extras:
            assert len(self.extras) == sum(sizes)
            sums = np.concatenate([np.zeros((1, 2)), np.cumsum(self.extras, axis=0)])
            ends = np.cumsum(sizes)
            times[:2] += (sums[ends] - sums[ends - sizes]).T
        times[:, 0] += self.first
        forward, input_gradient, weight_gradient = times.tolist()
        backward = times[1:].sum(axis=0).tolist()
        return Costs(forward, backward, input_gradient, weight_gradient, head=self.head)


def layer_times(config: Config) -> LayerTimes:
    forward, input_gradient, weight_gradient = _layer_flops(config)
    head = trace_model(config.model, config.data.sequence_length).head_flops
    # Its forward, and the gradients for its input and for its weight, which adapters freeze.
    passes = 2 if config.model.lora.rank else 3
    # In one program all stages share the first dense layers.
    is_shared = ENGINES[config.pipeline.engine].one_program
    return LayerTimes(
        input_gradient=input_gradient / forward,
        weight_gradient=weight_gradient / forward,
        head=passes * head / forward,
        extras=_extras(config),
        first=FirstLayers() if is_shared else first_layers(config),
    )


def first_layers(config: Config) -> FirstLayers:
    if not config.model.first_dense_layers:
        return FirstLayers()
    unit = _layer_flops(config)[0] / config.model.first_dense_layers
    # Each of them is computed again by itself.
    return FirstLayers(*(flops / unit for flops in _flops(with_dense_layers(config), 1)))


def _layer_flops(config: Config) -> tuple[float, float, float]:
    return _flops(config, config.pipeline.remat_iterations + config.pipeline.remat_layers)


def _flops(config: Config, recomputations: int) -> tuple[float, float, float]:
    """Return the FLOPs per token of a layer's forward, input gradient and weight gradients.

    The first two are averages over layers; only adapters have weight gradients if there are any.
    """
    layer, adapters = layer_of(config), adapter_flops(config.model)
    policy, again = remat_policy(config.pipeline), 0.0
    if not policy.everything:
        again = recomputations * layer.recomputed_flops((*policy.device, *policy.host))
    return (
        layer.weight_flops + layer.activation_flops + adapters,
        layer.weight_flops + 2 * layer.activation_flops + again + adapters,
        adapters or layer.weight_flops,
    )


def _extras(config: Config) -> tuple[tuple[float, float], ...]:
    """Return `LayerTimes.extras`: attention of a layer with a window takes less."""
    kinds = ["local" if is_local(kind) else "global" for kind in config.model.layer_kinds]
    if len({*kinds}) == 1:
        return ()
    forward, input_gradient, _ = _layer_flops(config)
    extras = {}
    for kind in {*kinds}:
        of_kind = _layer_flops(update(config, {"model.layer_pattern": [kind]}))
        extras[kind] = (of_kind[0] - forward) / forward, (of_kind[1] - input_gradient) / forward
    after_dense = kinds[config.model.first_dense_layers :]
    return tuple(extras[after_dense[i]] for i in layers_in_chunks(config))
