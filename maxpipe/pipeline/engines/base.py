"""What an engine's pipeline is: pure functions from parameters and a batch to losses and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from maxpipe.config.sections import PipelineConfig
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.layout import StageLayout
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding import context_parallel
from maxpipe.sharding.rules import AxisRules

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class EngineInputs:
    """What every pipeline is built from.

    Attributes:
      program: the model.
      rules: logical axis rules, bound to the mesh.
      config: `pipeline.*`, resolved.
      layout: where the layers live.
      table: the schedule, or None without a pipeline.
    """

    program: ModelProgram
    rules: AxisRules
    config: PipelineConfig
    layout: StageLayout
    table: Table | None = None

    @property
    def mesh(self) -> Mesh:
        return self.rules.mesh

    @property
    def context(self) -> int:
        """Devices over which sequences are split."""
        return self.mesh.shape[context_parallel.AXIS]


class Engine(Protocol):
    """Runs the model over its stages. Parameters: {"embed", "layers", "head"}, layer leaves as `layer_axes` says."""

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Logical axes of the leading dimensions of live layer parameters."""

    @property
    def to_canonical(self) -> Callable[[jax.Array], jax.Array]:
        """One layer leaf, live layout -> [num_layers, ...] in model order."""

    @property
    def from_canonical(self) -> Callable[[jax.Array], jax.Array]:
        """The inverse of `to_canonical`."""

    def layer_index(self) -> Any:
        """int32 array over the leading dimensions: each layer's index in model order, num_layers for padding."""

    def loss_and_gradients(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[Metrics, Params]:
        """Training loss and its gradient.

        Args:
          params: live parameters in `param_dtype`.
          batch: tokens, targets, positions, segment_ids int32 [B, T], weights float32 [B, T]; B is
            the global batch.
          key: PRNG key of the step.

        Returns:
          ({"loss"}, gradients like `params`). The loss is the weighted token sum over the global
          batch divided once by the global weight sum, plus the auxiliary loss per sequence.
        """

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Forward only: {"cross_entropy", "weight"}, sums over the tokens of a batch of any size."""
