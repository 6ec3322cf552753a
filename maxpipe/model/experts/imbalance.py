"""Compute experts that devices share with rows for a usual imbalance, and for any where needed.

One of n devices may get n times its even share of the assignments, and has rows for them all.
Kernels skip unused rows, but what happens between products does not: rows are taken from tokens,
gated and weighted. So a device counts its assignments first, and if they are no more than is usual
it runs a program with rows for so many. Both programs are exact, and neither has a collective, so
each device chooses for itself.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts.capacity import most_assignments, usual_assignments
from maxpipe.model.experts.mixture import ExpertsFn, ExpertWeights

USUAL_CALL = "usual_rows"  # name of the call with both programs, which predictions read
_LEAST = 4096  # assignments below which a second program is not worth compiling
_GAIN = 1.25  # how many times as many rows the other program must have

Result = TypeVar("Result")
Operands = tuple[jax.Array, jax.Array, jax.Array, ExpertWeights]  # as `ExpertsFn` takes them


def gains_by_usual_rows(
    choice: tuple[int, ...], num_experts: int, moe: MoEConfig, devices: int
) -> bool:
    """Return whether a second program is worth it; the first two arguments are a `LayoutFn`'s."""
    most = most_assignments(choice, num_experts, moe)
    return most >= max(_LEAST, _GAIN * usual_assignments(choice, devices))


def for_imbalance(usual: ExpertsFn, always: ExpertsFn, moe: MoEConfig, devices: int) -> ExpertsFn:
    """Return experts that run `usual` if its rows suffice, else `always`.

    The backward computes the rows again: to save them would take memory for those of both.

    Args:
      usual: experts with rows for `usual_assignments`.
      always: the same experts with rows for every choice.
      moe: `model.moe.*`.
      devices: number of devices that share the experts.
    """

    def choose(
        of: Callable[[ExpertsFn], Callable[..., Result]], operands: Operands, *others: jax.Array
    ) -> Result:
        choice, weights = operands[1], operands[3]
        count = jnp.sum(choice < weights.gate.shape[0])

        # Vectorised over the stages of a device, a conditional would run both.
        @sequential_vmap
        def usual_rows(is_usual: jax.Array, *operands: object) -> Result:
            result: Result = lax.cond(is_usual, of(usual), of(always), *operands)
            return result

        usual_rows.__name__ = USUAL_CALL
        is_usual = count <= usual_assignments(choice.shape, devices)
        return jax.jit(usual_rows)(is_usual, *operands, *others)

    @jax.custom_vjp
    def either(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        return choose(lambda experts: experts, (x, choice, combine, weights))

    def forward(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> tuple[jax.Array, Operands]:
        return either(x, choice, combine, weights), (x, choice, combine, weights)

    def backward(
        operands: Operands, gradient: jax.Array
    ) -> tuple[jax.Array, None, jax.Array, ExpertWeights]:
        of_x, of_combine, of_weights = choose(_gradients, operands, gradient)
        return of_x, None, of_combine, of_weights

    either.defvjp(forward, backward)

    def run(
        x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        is_worth = gains_by_usual_rows(choice.shape, weights.gate.shape[0], moe, devices)
        return (either if is_worth else always)(x, choice, combine, weights)

    return run


def _gradients(experts: ExpertsFn) -> Callable[..., tuple[jax.Array, jax.Array, ExpertWeights]]:
    """Return the function from operands and the result's gradient to the operands' gradients."""

    def gradients(
        x: jax.Array,
        choice: jax.Array,
        combine: jax.Array,
        weights: ExpertWeights,
        gradient: jax.Array,
    ) -> tuple[jax.Array, jax.Array, ExpertWeights]:
        def of_choice(x: jax.Array, combine: jax.Array, weights: ExpertWeights) -> jax.Array:
            return experts(x, choice, combine, weights)

        _, vjp = jax.vjp(of_choice, x, combine, weights)
        result: tuple[jax.Array, jax.Array, ExpertWeights] = vjp(gradient)
        return result

    return gradients
