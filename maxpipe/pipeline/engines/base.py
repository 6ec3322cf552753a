"""Define the contract of the four engines: parameters and a batch in, loss and gradients out.

An engine computes; a trainer (`maxpipe.training.trainer`) owns the live state and applies the
update. Letters: N layers in model order, B sequences of the global batch, T tokens of a sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxpipe.config.sections import PipelineConfig
from maxpipe.model.layers import COUNTS, AuxiliaryLosses
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline import microbatches
from maxpipe.pipeline.layout import LAYER_AXES, StageLayout
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding.collectives import CONTEXT_AXIS
from maxpipe.sharding.rules import AxisRules

Batch = microbatches.Batch
Metrics = dict[str, jax.Array]
ParamsT = TypeVar("ParamsT")
LayerT = TypeVar("LayerT")


# One object for all engines, so that the builder makes any of them the same way.
@dataclass(frozen=True)
class EngineInputs:
    """What every engine is built from.

    Attributes:
      rules: logical axis rules, bound to `mesh`, or for the mpmd engine to the abstract mesh of one
        stage.
      mesh: all devices.
      batch_shape: (B, T) of training batches.
      table: the schedule; None without a pipeline.
      gathers_in_steps: whether a chunk's weights are gathered in steps, where the engine can.
    """

    program: ModelProgram
    rules: AxisRules
    config: PipelineConfig
    layout: StageLayout
    mesh: Mesh
    batch_shape: tuple[int, int]
    table: Table | None = None
    gathers_in_steps: bool = False

    @property
    def context(self) -> int:
        return self.mesh.shape[CONTEXT_AXIS]


def metrics_of(loss: jax.Array, auxiliary: AuxiliaryLosses, scale: jax.Array | float) -> Metrics:
    """Return what a step reports: token loss, auxiliary losses by name, counts of experts.

    Auxiliary losses are summed over sequences; `scale`, for means, is the inverse of their number.
    """
    # Counts are totals of the whole batch, not means over sequences.
    return {"loss": loss} | {
        name: value if name in COUNTS else scale * value for name, value in auxiliary.items()
    }


def sum_of(metrics: Metrics) -> jax.Array:
    """Return the training loss, the sum of the losses that `metrics_of` returns."""
    # The token loss is the first metric, see `metrics_of`.
    total, *auxiliary = (value for name, value in metrics.items() if name not in COUNTS)
    return sum(auxiliary, total)


def float32_zeros(params: Params) -> Params:
    """Return sums of gradients to begin with, zeros shaped like parameters."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def add(total: jax.Array, more: jax.Array) -> jax.Array:
    return total + more.astype(total.dtype)


class Engine(ABC, Generic[ParamsT, LayerT]):
    """Compute losses and gradients of a model over its stages.

    `ParamsT` is the type of live parameters, a pytree: {"embed", "layers", "head"} where one
    program runs on all devices (`SpmdEngine`), a tuple with one tree per stage in the mpmd engine.
    `LayerT` is the type of one live layer parameter: an array with leading layer dimensions, or in
    the mpmd engine one such array per chunk. Embedding and head have no layer dimensions.

    Attributes:
      layer_axes: logical axes of the leading dimensions of live layer arrays.
    """

    layer_axes: tuple[str, ...]

    @abstractmethod
    def __init__(self, inputs: EngineInputs):
        """Build the engine; raise ConfigError if it cannot run this configuration."""

    @abstractmethod
    def layer_index(self) -> np.ndarray | tuple[np.ndarray, ...]:
        """Return int32 over the dimensions of `layer_axes`: index in model order, N for padding."""

    @abstractmethod
    def to_canonical(self, leaf: LayerT) -> jax.Array | np.ndarray:
        """Convert one layer parameter from the live layout to [N, ...] in model order."""

    @abstractmethod
    def from_canonical(self, leaf: jax.Array) -> LayerT:
        """Convert one layer parameter from [N, ...] in model order to the live layout."""

    @abstractmethod
    def loss_and_gradients(
        self, params: ParamsT, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, ParamsT]:
        """Compute the training loss and its gradient.

        Args:
          params: live parameters in `param_dtype`.
          batch: tokens, targets, positions, segment_ids int32 [B, T], weights float32 [B, T].

        Returns:
          ({"loss", *names of auxiliary losses}, gradients of their sum, like `params` but
          without leaves where a parameter is frozen). The loss is
          the weighted token sum over the global batch divided once by the global weight sum; an
          auxiliary loss is the mean over sequences. With experts there is also `EXPERT_LOAD`,
          float32 [N, E]: assignments of the global batch's tokens, rows in model order; with a
          capacity `EXPERT_DROPS`, float32 [N].
        """

    @abstractmethod
    def evaluate(self, params: ParamsT, batch: Batch) -> Metrics:
        """Return {"cross_entropy", "weight"}, sums over the tokens of a batch of any size."""


class SpmdEngine(Engine[Params, jax.Array]):
    """An engine whose methods are traced into one program that runs on all devices.

    Live layers lie as `_layout` says, [V + E, S, L, ...], unless the engine has no stages.
    """

    layer_axes: tuple[str, ...] = LAYER_AXES
    _layout: StageLayout

    def layer_index(self) -> np.ndarray:
        return self._layout.layer_index

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.to_canonical(leaf)

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        return self._layout.from_canonical(leaf)
