"""Run one phase of circular iterations on gathered weights; see `repeat_gather`.

A phase runs inside the manual program, so arrays are one device's parts. In a switch the stages
move from one repeat to the next, one stage every d iterations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.parameters import Params
from maxpipe.pipeline.engines.circular.conveyor import Conveyor, State
from maxpipe.pipeline.engines.circular.iterations import DeviceInputs, Iterations
from maxpipe.pipeline.split_vjp import SplitVjp

Index: TypeAlias = jax.Array | int
LoopState = TypeVar("LoopState")


class ForwardCarry(NamedTuple):
    """Loop state, and residuals of the iterations so far, [iterations, ...] each."""

    state: State
    residuals: list[jax.Array]


class GradientSums(NamedTuple):
    """Gradients within a phase; `earlier` sums those of the repeat before a switch; else None."""

    state: State
    sums: Params
    earlier: Params | None


def forward_phase(
    iterations: Iterations,
    inputs: DeviceInputs,
    split: SplitVjp | None,
    carry: ForwardCarry,
    start: Index,
    length: int,
    weights: Params,
    next_weights: Params | None = None,
) -> ForwardCarry:
    """Run iterations start ... start + length - 1.

    Args:
      iterations, inputs: description of the iterations, and what they read.
      split: the stages' vjp, whose forward returns residuals; None without a backward.
      carry: loop state and residuals so far.
      start, length: first iteration and number of iterations of the phase.
      weights: weights of all stages, [S, L, ...].
      next_weights: in a switch, the next repeat's weights, which one stage after the other takes.
    """
    conveyor = iterations.conveyor

    def iteration(
        carry_and_weights: tuple[ForwardCarry, Params], t: Index
    ) -> tuple[ForwardCarry, Params]:
        (state, residuals), weights = carry_and_weights
        # 1. In a switch, one more stage has the next weights.
        if next_weights is not None:
            weights = _switched(conveyor, t, start, next_weights, weights)
        # 2. The stages compute.
        x = conveyor.stage_inputs(state, t)
        stage_inputs = iterations.inputs_of(t, inputs.side, inputs.key_data)
        if split is None:
            y, aux = iterations.stages(x, weights, stage_inputs)
        else:
            (y, aux), new = split.forward(x, *iterations.operands(weights, stage_inputs))
            residuals = [
                lax.dynamic_update_index_in_dim(buffer, residual, t, 0)
                for buffer, residual in zip(residuals, new, strict=True)
            ]
        # 3. Their outputs move on.
        return ForwardCarry(conveyor.next_state(state, y, aux, t), residuals), weights

    # Weights are part of the loop state so that a switch overwrites them; otherwise XLA would keep
    # a third set.
    carry, _ = loop(iteration, (carry, weights), start, length, scan=iterations.scan_iterations)
    return carry


def backward_phase(
    iterations: Iterations,
    inputs: DeviceInputs,
    split: SplitVjp,
    residuals: list[jax.Array],
    gradients: GradientSums,
    start: Index,
    length: int,
    weights: Params,
    earlier_weights: Params | None = None,
) -> GradientSums:
    """Run iterations start + length - 1 ... start in reverse; see `forward_phase`.

    Args:
      iterations, inputs, split: as in the forward.
      residuals: residuals of all iterations, [iterations, ...] each.
      gradients: gradient of the state after the phase, and sums so far.
      start, length: first iteration and number of iterations of the phase.
      weights: weights of all stages at the phase's end, [S, L, ...].
      earlier_weights: in a switch, the weights that the stages had before.
    """
    conveyor = iterations.conveyor

    def iteration(
        gradients_and_weights: tuple[GradientSums, Params], i: Index
    ) -> tuple[GradientSums, Params]:
        (state, sums, earlier), weights = gradients_and_weights
        t = start + (length - 1) - i
        # 1. Weights and inputs of the iteration, as in the forward.
        if earlier_weights is not None:
            weights = _switched(conveyor, t, start, weights, earlier_weights)
        stage_inputs = iterations.inputs_of(t, inputs.side, inputs.key_data)
        # 2. Back through `next_state`, to the stages' outputs.
        x_shape = jax.eval_shape(lambda s: conveyor.stage_inputs(s, t), state)
        y_shape, aux_shape = jax.eval_shape(iterations.stages, x_shape, weights, stage_inputs)
        shapes = (state, y_shape, aux_shape)
        state, dy, daux = transpose(
            lambda s, y, aux: conveyor.next_state(s, y, aux, t), shapes, state
        )
        # 3. Back through the stages: dx [S, B, T, D], dw [S, L, ...].
        stored = [lax.dynamic_index_in_dim(buffer, t, keepdims=False) for buffer in residuals]
        operands = iterations.operands(weights, stage_inputs)
        dx, dw = split.backward(stored, *operands, (dy, daux))
        # 4. Back through `stage_inputs`, to the state before the iteration.
        (dstate,) = transpose(lambda s: conveyor.stage_inputs(s, t), (state,), dx)
        state = jax.tree.map(jnp.add, state, dstate)
        # 5. Add the weights' gradients to the sum of the repeat that each stage is in.
        if earlier_weights is None:
            return GradientSums(state, jax.tree.map(_add, sums, dw), None), weights
        zeros = jax.tree.map(jnp.zeros_like, dw)
        sums = jax.tree.map(_add, sums, _switched(conveyor, t, start, dw, zeros))
        earlier = jax.tree.map(_add, earlier, _switched(conveyor, t, start, zeros, dw))
        return GradientSums(state, sums, earlier), weights

    gradients, _ = loop(iteration, (gradients, weights), 0, length, scan=iterations.scan_iterations)
    return gradients


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


def _add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    return total + gradient.astype(total.dtype)
