"""Splitting a backward over time: the input gradient now, which the stage before waits for, weight gradients later.

Both are cut out of one program by what depends on what. What the weight gradients need of the input gradient's work,
mostly gradients of the results of matrix products, waits in a stash. What is cheap to make of residuals or of one
stashed array is not stashed but made again: norms, activation functions, casts, gradients through a gate. So is all
that is made of weights alone, as in `SplitVjp`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from maxpipe.pipeline.jaxprs import CALLS, CHECKPOINTS, ancestors, inline, is_cheap, part, read_by, variables
from maxpipe.pipeline.residuals import Arrays, SplitVjp


class HalvedVjp(SplitVjp):
    """A `SplitVjp` whose backward is two functions, the second of which nobody waits for.

    Loops stay whole: gradients of weights that arise in one are computed with the input gradient, and stashed.

    Args:
      f, x, weights, rest: as for `SplitVjp`.

    Attributes:
      stash: shapes of what `input_gradient` hands to `weight_gradients`, each once.
    """

    def __init__(self, f: Callable[[jax.Array, Any, Any], Any], x: Any, weights: Any, rest: Any):
        super().__init__(f, x, weights, rest)
        inputs = (self.kept, weights, rest, self.outputs)
        traced, shapes = jax.make_jaxpr(self.backward, return_shape=True)(*inputs)
        program = inline(traced, CALLS + CHECKPOINTS)
        jaxpr = program.jaxpr
        num_given = len(jax.tree.leaves(inputs[:-1]))
        given, cotangents = jaxpr.invars[:num_given], jaxpr.invars[num_given:]
        dx, *dw = jaxpr.outvars
        again = _made_again(jaxpr.eqns, given[: len(self.kept)], cotangents)
        first = ancestors(jaxpr.eqns, [dx])
        done = {*cotangents, *(v for eqn in first for v in eqn.outvars)} - again
        second = ancestors([eqn for eqn in jaxpr.eqns if done.isdisjoint(eqn.outvars)], dw)
        stashed = [v for v in read_by(second, dw) if v in done]

        def function(inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> Any:
            half = part(jaxpr, [*jaxpr.constvars, *inputs], equations, outputs)
            return lambda *args: jax.core.eval_jaxpr(half, (), *program.consts, *jax.tree.leaves(args))

        self.stash = [v.aval for v in stashed]
        self._first = function(jaxpr.invars, first, [dx, *stashed])
        self._second = function([*given, *stashed], second, dw)
        self._weights = jax.tree.structure(shapes[1])

    def input_gradient(
        self, kept: Sequence[jax.Array], weights: Any, rest: Any, cotangent: Any
    ) -> tuple[jax.Array, Arrays]:
        """(gradient for x, stash) of a cotangent of the outputs."""
        dx, *stash = self._first(kept, weights, rest, cotangent)
        return dx, stash

    def weight_gradients(
        self, kept: Sequence[jax.Array], weights: Any, rest: Any, stash: Sequence[jax.Array]
    ) -> Any:
        """Gradients for the weights of the cotangent whose `input_gradient` left the stash."""
        return jax.tree.unflatten(self._weights, self._second(kept, weights, rest, stash))


def _made_again(equations: Sequence[JaxprEqn], kept: Iterable[Var], cotangents: Iterable[Var]) -> set[Var]:
    """Variables that the second half rather makes for itself than finds stashed.

    Those are what is made of weights alone, and the results of cheap equations on that, on residuals and on at most one
    variable that is stashed and takes no more room than what is made of it.
    """
    # For all that depends on activations: what has to be stashed so that it can be had, None if nothing.
    source: dict[Var, Var | None] = dict.fromkeys(kept) | {v: v for v in cotangents}
    for eqn in equations:
        needed = {source[v] for v in variables(eqn.invars) if v in source}
        stashed = needed - {None}
        if not is_cheap(eqn) or len(stashed) > 1 or any(_size(s) > _size(v) for s in stashed for v in eqn.outvars):
            source.update((v, v) for v in eqn.outvars if needed)
        else:
            source.update((v, next(iter(stashed), None)) for v in eqn.outvars if needed)
    return {v for eqn in equations for v in eqn.outvars if source.get(v) is not v}


def _size(v: Any) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize
