"""Describe the iterations of a circular pipeline on gathered weights; see `repeat_gather`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, Tree
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, Iteration
from maxpipe.pipeline.layout import LAYER_AXES
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES, Gather
from maxpipe.sharding.rules import AxisRules, axes_of


class StageInputs(NamedTuple):
    """What the stages read besides activations and weights: arrays without a gradient.

    Attributes:
      layer_index: model-order index of each stage's layers, int32 [S, L].
      side: side inputs of each stage's microbatch, [S, B, ...].
      key: PRNG key of the step, or None without dropout.
    """

    layer_index: jax.Array
    side: SideInputs
    key: jax.Array | None


class BatchSpecs(NamedTuple):
    """PartitionSpecs over the batch axes.

    Attributes:
      layers: specs of live layer parameters [V + E, S, L, ...], a tree like them.
      io: spec of the conveyor [S, K, B, T, D].
      side: specs of side inputs [M, B, ...], as `SideInputs`.
    """

    layers: Tree[PartitionSpec]
    io: PartitionSpec
    side: SideInputs


# (activations [S, B, T, D], weights [S, L, ...], inputs)
# -> (activations, auxiliary losses, [S] each)
Stages = Callable[[jax.Array, Params, StageInputs], tuple[jax.Array, AuxiliaryLosses]]
# (t, side inputs [M, B, ...], key data) -> inputs of iteration t
InputsOf = Callable[[Iteration, SideInputs, jax.Array | None], StageInputs]


def unfit_rules(rules: AxisRules) -> list[str]:
    """Return why axis rules do not suit gathered weights, a phrase with a remedy for each rule.

    Gradients are summed over all row axes, so no row may be on two devices. Every device of a
    stage gathers parts of all its layers, so none of these may be elsewhere.
    """
    reasons = []
    row_axes = {axis for axis in ROW_AXES if rules.mesh.shape[axis] > 1}
    if axes_of(rules.spec(("activation_batch",))) != row_axes:
        names = ", ".join(ROW_AXES)
        reasons.append(f"needs rows over all of {names}; use [activation_batch, [{names}]]")
    for name in LAYER_AXES:
        if axes := axes_of(rules.spec((name,))).intersection(BATCH_AXES):
            remedy = f"[{name}, [{'stage' if name == 'stage' else ''}]]"
            reasons.append(f"needs {name} over no part of {', '.join(sorted(axes))}; use {remedy}")
    return reasons


@dataclass(frozen=True, eq=False)
class Iterations:
    """Description of the iterations, the same in forward and backward.

    Attributes:
      conveyor: order of the units, and the loop state.
      stages: function that does the work of all stages in one iteration.
      inputs_of: function that selects the stages' inputs of an iteration.
      trained: function that replaces the frozen leaves of a tree of layer parameters by None.
      gathers: a `Gather` for each parameter of a layer.
      specs: layouts of the arguments.
      mesh: the device mesh.
      no_auxiliary: function that returns auxiliary losses of 0.
      gather_once: whether all repeats are gathered before the first iteration.
      scan_iterations, scan_repeats, scan_layers: whether to compile one loop body, not copies.
    """

    conveyor: Conveyor
    stages: Stages
    inputs_of: InputsOf
    trained: Callable[[Params], Params]
    gathers: Tree[Gather]
    specs: BatchSpecs
    mesh: Mesh
    no_auxiliary: Callable[[], AuxiliaryLosses]
    gather_once: bool
    scan_iterations: bool
    scan_repeats: bool
    scan_layers: bool

    def operands(
        self, weights: Params, inputs: StageInputs
    ) -> tuple[Params, tuple[Params, StageInputs]]:
        """Return the weights of the stages' vjp, those that are trained, and its inputs."""
        return self.trained(weights), (weights, inputs)

    @property
    def lookahead(self) -> int:
        """Return how many repeats ahead weights are gathered (1 with `gather_once`)."""
        conveyor = self.conveyor
        has_short_steady = conveyor.num_microbatches == conveyor.delay * conveyor.num_stages
        return 2 if has_short_steady and not self.gather_once else 1


class DeviceInputs(NamedTuple):
    """What a pass reads, inside the manual program.

    Attributes:
      weights: live layer parameters [V + E, S, L, ...], this device's shards; with `gather_once`
        [V, S, L, ...], gathered.
      side: side inputs [M, B, ...] of this device's rows.
      key_data: raw data of the step's PRNG key; None without dropout.
      num_rows: V + E, the rows of live layer parameters.
    """

    weights: Params
    side: SideInputs
    key_data: jax.Array | None
    num_rows: int
