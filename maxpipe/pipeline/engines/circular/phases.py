"""Describe circular iterations on gathered weights, and run one phase; see `repeat_gather`.

A phase runs inside the manual program, so arrays are one device's parts. In a switch the stages
move from one repeat to the next, one stage every d iterations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.sections import PipelineConfig
from maxpipe.model.layers import AuxiliaryLosses, SideInputs
from maxpipe.model.parameters import Params, Tree, trainable
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.engines.base import add
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, Iteration, State
from maxpipe.pipeline.layout import LAYER_AXES
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES, Gather
from maxpipe.pipeline.split_vjp import Arrays, SplitVjp
from maxpipe.sharding.rules import AxisRules, axes_of

Index: TypeAlias = jax.Array | int
LoopState = TypeVar("LoopState")


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
      stages: function that does the work of all stages in one iteration.
      inputs_of: function that selects the stages' inputs of an iteration.
      specs: layouts of the arguments.
    """

    conveyor: Conveyor
    stages: Stages
    inputs_of: InputsOf
    program: ModelProgram
    config: PipelineConfig
    gathers: Tree[Gather]
    specs: BatchSpecs
    mesh: Mesh

    @property
    def gather_once(self) -> bool:
        return self.config.fsdp_gather == "once"

    @property
    def lookahead(self) -> int:
        """Return how many repeats ahead weights are gathered (1 with `gather_once`)."""
        conveyor = self.conveyor
        has_short_steady = conveyor.num_microbatches == conveyor.delay * conveyor.num_stages
        return 2 if has_short_steady and not self.gather_once else 1

    def trained(self, layers: Params) -> Params:
        return trainable(self.program.specs["layers"], layers)

    def operands(
        self, weights: Params, inputs: StageInputs
    ) -> tuple[Params, tuple[Params, StageInputs]]:
        return self.trained(weights), (weights, inputs)


class ForwardCarry(NamedTuple):
    """Loop state, and residuals of the iterations so far, [iterations, ...] each."""

    state: State
    residuals: Arrays


class BackwardCarry(NamedTuple):
    """Gradients, of weights from this device's rows alone until a repeat is over.

    Attributes:
      state: gradient of the loop state.
      sums: weight gradients of this repeat so far, float32 [S, L, ...].
      earlier: those of the repeat before a switch; else None.
      totals: weight gradients of all repeats, float32 [V, S, L, ...] or like the shards; None
        within a phase.
    """

    state: State
    sums: Params
    earlier: Params | None = None
    totals: Params | None = None


@dataclass(frozen=True, eq=False)
class Phases:
    """The phases of one pass over the iterations.

    Attributes:
      side: side inputs [M, B, ...] of this device's rows.
      key_data: raw data of the step's PRNG key; None without dropout.
      split: the stages' vjp; None without a backward.
    """

    iterations: Iterations
    side: SideInputs
    key_data: jax.Array | None
    split: SplitVjp | None

    def forward(
        self,
        carry: ForwardCarry,
        start: Index,
        length: int,
        weights: Params,
        next_weights: Params | None = None,
    ) -> ForwardCarry:
        """Run iterations start ... start + length - 1.

        Args:
          weights: weights of all stages, [S, L, ...].
          next_weights: in a switch, the next repeat's, which one stage after the other takes.
        """
        conveyor = self.iterations.conveyor

        def iteration(
            carry_and_weights: tuple[ForwardCarry, Params], t: Index
        ) -> tuple[ForwardCarry, Params]:
            (state, residuals), weights = carry_and_weights
            # 1. In a switch, one more stage has the next weights.
            if next_weights is not None:
                weights = _switched(conveyor, t, start, next_weights, weights)
            # 2. The stages compute.
            x = conveyor.stage_inputs(state, t)
            inputs = self.iterations.inputs_of(t, self.side, self.key_data)
            if self.split is None:
                y, aux = self.iterations.stages(x, weights, inputs)
            else:
                operands = self.iterations.operands(weights, inputs)
                (y, aux), new = self.split.forward(x, *operands)
                residuals = [
                    lax.dynamic_update_index_in_dim(buffer, residual, t, 0)
                    for buffer, residual in zip(residuals, new, strict=True)
                ]
            # 3. Their outputs move on.
            return ForwardCarry(conveyor.next_state(state, y, aux, t), residuals), weights

        # Weights are part of the loop state so that a switch overwrites them; otherwise XLA would
        # keep a third set.
        scan = self.iterations.config.scan_iterations
        carry, _ = loop(iteration, (carry, weights), start, length, scan=scan)
        return carry

    def backward(
        self,
        residuals: Arrays,
        carry: BackwardCarry,
        start: Index,
        length: int,
        weights: Params,
        earlier_weights: Params | None = None,
    ) -> BackwardCarry:
        """Run iterations start + length - 1 ... start in reverse.

        Args:
          residuals: residuals of all iterations, [iterations, ...] each.
          carry: gradient of the state after the phase, and sums so far.
          weights: weights of all stages at the phase's end, [S, L, ...].
          earlier_weights: in a switch, the weights that the stages had before.
        """
        conveyor, split = self.iterations.conveyor, self.split
        assert split is not None

        def iteration(
            carry_and_weights: tuple[BackwardCarry, Params], i: Index
        ) -> tuple[BackwardCarry, Params]:
            (state, sums, earlier, _), weights = carry_and_weights
            t = start + (length - 1) - i
            # 1. Weights and inputs of the iteration, as in the forward.
            if earlier_weights is not None:
                weights = _switched(conveyor, t, start, weights, earlier_weights)
            inputs = self.iterations.inputs_of(t, self.side, self.key_data)
            # 2. Back through `next_state`, to the stages' outputs.
            state, dy, daux = transpose(
                lambda s, y, aux: conveyor.next_state(s, y, aux, t), (state, *split.outputs), state
            )
            # 3. Back through the stages: dx [S, B, T, D], dw [S, L, ...].
            stored = [lax.dynamic_index_in_dim(buffer, t, keepdims=False) for buffer in residuals]
            operands = self.iterations.operands(weights, inputs)
            dx, dw = split.backward(stored, *operands, (dy, daux))
            # 4. Back through `stage_inputs`, to the state before the iteration.
            (dstate,) = transpose(lambda s: conveyor.stage_inputs(s, t), (state,), dx)
            state = jax.tree.map(jnp.add, state, dstate)
            # 5. Add the weights' gradients to the sum of the repeat that each stage is in.
            if earlier_weights is None:
                return BackwardCarry(state, jax.tree.map(add, sums, dw)), weights
            zeros = jax.tree.map(jnp.zeros_like, dw)
            sums = jax.tree.map(add, sums, _switched(conveyor, t, start, dw, zeros))
            earlier = jax.tree.map(add, earlier, _switched(conveyor, t, start, zeros, dw))
            return BackwardCarry(state, sums, earlier), weights

        scan = self.iterations.config.scan_iterations
        carry, _ = loop(iteration, (carry, weights), 0, length, scan=scan)
        return carry


def _switched(conveyor: Conveyor, t: Index, start: Index, new: Params, old: Params) -> Params:
    """Select `new` for the stages past a switch in iteration t; the switch begins at `start`."""
    is_past = conveyor.delay * jnp.arange(conveyor.num_stages) <= t - start  # [S]

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(is_past.reshape(-1, *[1] * (new.ndim - 1)), new, old)  # [S, 1, ...]

    return jax.tree.map(select, new, old)


def loop(
    step: Callable[[LoopState, Index], LoopState],
    state: LoopState,
    start: Index,
    length: int,
    *,
    scan: bool,
) -> LoopState:
    if length and scan:
        indices = start + jnp.arange(length)
        return lax.scan(lambda state, i: (step(state, i), None), state, indices)[0]
    for i in range(length):
        state = step(state, start + i)
    return state


def transpose(
    f: Callable[..., object], shapes: tuple[object, ...], cotangent: object
) -> tuple[Any, ...]:
    """Return the cotangents of the arguments of an affine function, arrays like `shapes`."""
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.vjp(f, *zeros)[1](cotangent)
