"""Compute the times of units from FLOPs: how long a stage with some number of layers takes.

These are FLOPs of products with weights, and of attention, of which a causal query does half. The
backward of a product with weights is one product for its input and one for its weight; attention's
backward belongs to the input gradient.

They leave out norms, softmax, rotations and activation functions, a per cent or two of the FLOPs at
real widths, and the embedding: a lookup in the forward, and in the backward a sum that moves bytes
and multiplies nothing. A chunk that is recomputed as a whole need not repeat its very last product,
which is counted here. The kernel that runs without accelerators computes attention's masked half
too.
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

LOCAL = "local"  # kinds of layers in a pattern
GLOBAL = "global"


class FirstLayers(NamedTuple):
    """Times of all first dense layers together, in units of the forward of one other layer.

    Attributes:
      forward, input_gradient, weight_gradient: as in `LayerTimes`.
    """

    forward: float
    input_gradient: float
    weight_gradient: float


NO_FIRST_LAYERS = FirstLayers(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LayerTimes:
    """Times for one microbatch, in units of the forward of one layer.

    Attributes:
      input_gradient: a layer's input gradient on average, with what it recomputes.
      weight_gradient: a layer's weight gradient.
      head: loss and its gradient.
      extras: for each layer in a chunk, in model order, what its forward and its input gradient
        take above the average; empty if layers are alike.
      first: the first dense layers, which the units of the first chunk run before their own; 0
        where all stages share them.
    """

    input_gradient: float
    weight_gradient: float
    head: float
    extras: tuple[tuple[float, float], ...] = ()
    first: FirstLayers = NO_FIRST_LAYERS

    @property
    def layer(self) -> float:
        """Return the time of forward and backward of one layer on average."""
        return 1.0 + self.input_gradient + self.weight_gradient

    @property
    def first_layers(self) -> float:
        """Return the time of the first dense layers, forward and backward, in the first chunk."""
        return sum(self.first)

    def of_layers(self, first: int, count: int) -> float:
        """Return the time of forward and backward of some layers, one after another."""
        return self.layer * count + sum(map(sum, self.extras[first : first + count]))

    def costs(self, sizes: Sequence[int], table: Table) -> Costs:
        """Return the costs of a table whose global chunks have so many layers."""
        layers = np.asarray(sizes, float)
        assert layers.shape == (table.num_chunks,)
        forward, input_gradient = self._extras_of_chunks(sizes)
        forward += layers
        input_gradient += self.input_gradient * layers
        weight_gradient = self.weight_gradient * layers
        for of_chunks, first in zip(
            (forward, input_gradient, weight_gradient), self.first, strict=True
        ):
            of_chunks[0] += first
        return Costs(
            forward=forward.tolist(),
            backward=(input_gradient + weight_gradient).tolist(),
            input_gradient=input_gradient.tolist(),
            weight_gradient=weight_gradient.tolist(),
            head=self.head,
        )

    def _extras_of_chunks(self, sizes: Sequence[int]) -> np.ndarray:
        """Return the sums of `extras` of each chunk, float [2, chunks]."""
        if not self.extras:
            return np.zeros((2, len(sizes)))
        assert len(self.extras) == sum(sizes)
        ends = np.cumsum(sizes)
        sums = np.concatenate([np.zeros((1, 2)), np.cumsum(self.extras, axis=0)])
        return (sums[ends] - sums[ends - sizes]).T


def layer_times(config: Config) -> LayerTimes:
    forward, input_gradient = _flops(config)
    head = trace_model(config.model, config.data.sequence_length).head_flops
    # Its forward, and the gradients for its input and for its weight, which adapters freeze.
    passes = 2 if config.model.lora.rank else 3
    return LayerTimes(
        input_gradient=input_gradient / forward,
        weight_gradient=_weight_gradient_flops(config) / forward,
        head=passes * head / forward,
        extras=_extras(config),
        first=_of_first_chunk(config),
    )


def _of_first_chunk(config: Config) -> FirstLayers:
    """Return `LayerTimes.first`: in one program all stages share the first dense layers."""
    is_shared = ENGINES[config.pipeline.engine].one_program
    return NO_FIRST_LAYERS if is_shared else first_layers(config)


def first_layers(config: Config) -> FirstLayers:
    """Compute the times of the first dense layers of a resolved configuration."""
    first = config.model.first_dense_layers
    if not first:
        return NO_FIRST_LAYERS
    layer = layer_of(with_dense_layers(config))
    policy, again = remat_policy(config.pipeline), 0.0
    if not policy.everything:  # each of them is computed again by itself
        again = layer.recomputed_flops((*policy.device, *policy.host))
    unit = _flops(config)[0] / first
    adapters = adapter_flops(config.model.dense)
    return FirstLayers(
        (layer.weight_flops + layer.activation_flops + adapters) / unit,
        (layer.weight_flops + 2 * layer.activation_flops + again + adapters) / unit,
        _weight_gradient_flops(with_dense_layers(config)) / unit,
    )


def _flops(config: Config) -> tuple[float, float]:
    """Return the FLOPs per token of a layer's forward and of its input gradient, on average."""
    layer, adapters = layer_of(config), adapter_flops(config.model)
    input_gradient = layer.weight_flops + 2 * layer.activation_flops + _recomputed_flops(config)
    return layer.weight_flops + layer.activation_flops + adapters, input_gradient + adapters


def _weight_gradient_flops(config: Config) -> float:
    """Return the FLOPs per token of a layer's weight gradients; only of adapters' if it has any."""
    return adapter_flops(config.model) or layer_of(config).weight_flops


def _extras(config: Config) -> tuple[tuple[float, float], ...]:
    """Return `LayerTimes.extras`: attention of a layer with a window takes less."""
    kinds = [LOCAL if is_local(kind) else GLOBAL for kind in config.model.layer_kinds]
    if len({*kinds}) == 1:
        return ()
    forward, input_gradient = _flops(config)
    extras = {}
    for kind in {*kinds}:
        of_kind = _flops(update(config, {"model.layer_pattern": [kind]}))
        extras[kind] = (of_kind[0] - forward) / forward, (of_kind[1] - input_gradient) / forward
    after_dense = kinds[config.model.first_dense_layers :]
    return tuple(extras[after_dense[i]] for i in layers_in_chunks(config))


def _recomputed_flops(config: Config) -> float:
    """Return the FLOPs per token that a layer's backward recomputes, see `pipeline.chunk`."""
    pipeline = config.pipeline
    policy = remat_policy(pipeline)
    if policy.everything:
        return 0.0
    passes = pipeline.remat_iterations + pipeline.remat_layers
    return passes * layer_of(config).recomputed_flops((*policy.device, *policy.host))
