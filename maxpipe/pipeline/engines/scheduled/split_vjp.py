"""Splitting a vjp over time: run the forward now, keep only what depends on the activation, run the backward later.

A vjp's residuals fall into two classes. Those that depend on the activation (saved intermediate
values) must be kept from the forward to the backward. Those that do not (weights, their casts and
gathered copies, masks, dropout bits) can be computed again from the inputs that are still at hand;
keeping them would hold a copy of the weights for every unit in flight. Identity of tracers does not
tell the classes apart, since casts and loops make new values out of weights, so the dependence is
read off the jaxpr.

Splitting a backward over time: the input gradient now, which the stage before waits for, weight
gradients later.

Both are cut out of one program by what depends on what. What the weight gradients need of the input
gradient's work, mostly gradients of the results of matrix products, waits in a stash. What is cheap
to make of residuals or of one stashed array is not stashed but made again: norms, activation
functions, casts, gradients through a gate. So is all that is made of weights alone, as in
`SplitVjp`."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval as pe

from maxpipe.pipeline.jaxprs import (
    CALLS,
    CHECKPOINTS,
    ancestors,
    inline,
    is_cheap,
    open_jaxpr,
    part,
    read_by,
    variables,
)

Arrays = list[jax.Array]


class SplitVjp:
    """Forward and backward of `f(x, weights, rest)` as two functions that meet in a list of arrays.

    Args:
      f: pure function of an activation `x` (one array), a pytree `weights`, and a pytree `rest` of
        inputs without a gradient.
      x, weights, rest: arrays or shapes that it is traced with; every later call has the same
        shapes.

    Attributes:
      kept: shapes of what `forward` hands to `backward`: the residuals that depend on `x`, each
        once.
      outputs: shapes of the outputs of f, and of their cotangents.
    """

    def __init__(self, f: Callable[[jax.Array, Any, Any], Any], x: Any, weights: Any, rest: Any):
        found: dict[str, Any] = {}

        def forward(x: jax.Array, weights: Any, rest: Any) -> Any:
            y, vjp = jax.vjp(lambda x, weights: f(x, weights, rest), x, weights)
            residuals, found["vjp"] = jax.tree.flatten(vjp)
            return y, residuals

        jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(x, weights, rest)
        self.outputs = shapes[0]
        self._vjp = found["vjp"]
        num_outputs = len(jax.tree.leaves(self.outputs))
        depends = dependence(jaxpr.jaxpr, [True] + [False] * (len(jaxpr.jaxpr.invars) - 1))[
            num_outputs:
        ]
        variables = jaxpr.jaxpr.outvars[num_outputs:]
        unique: dict[Any, int] = {}
        # For each residual: its place among the kept ones, or None if it is computed again.
        self._place = [
            unique.setdefault(v, len(unique)) if d else None
            for v, d in zip(variables, depends, strict=True)
        ]
        first = {
            place: i for i, place in reversed(list(enumerate(self._place))) if place is not None
        }
        chosen = [num_outputs + first[place] for place in range(len(unique))]
        again = [num_outputs + i for i, place in enumerate(self._place) if place is None]
        self._forward = _select(jaxpr, [*range(num_outputs), *chosen])
        self._again = _select(jaxpr, again)
        self.kept = [jaxpr.out_avals[i] for i in chosen]

    def forward(self, x: jax.Array, weights: Any, rest: Any) -> tuple[Any, Arrays]:
        """(outputs of f, kept residuals)."""
        flat = self._forward([x, *jax.tree.leaves((weights, rest))])
        outputs, structure = jax.tree.flatten(self.outputs)
        return jax.tree.unflatten(structure, flat[: len(outputs)]), flat[len(outputs) :]

    def backward(
        self, kept: Sequence[jax.Array], weights: Any, rest: Any, cotangent: Any
    ) -> tuple[jax.Array, Any]:
        """Gradients (for x, for the weights) of a cotangent of the outputs."""
        again = iter(self._again([None, *jax.tree.leaves((weights, rest))]))
        residuals = [next(again) if place is None else kept[place] for place in self._place]
        return jax.tree.unflatten(self._vjp, residuals)(cotangent)


def dependence(jaxpr: Jaxpr, tainted: Sequence[bool]) -> list[bool]:
    """For each output of a jaxpr, whether it may depend on a tainted input.

    Loops, conditionals and calls are looked into, so that an output of a scan that only passes
    weights through is told from one that carries activations.
    """
    taint = dict(zip(jaxpr.invars, tainted, strict=True)) | dict.fromkeys(jaxpr.constvars, False)

    def of(v: Any) -> bool:
        return not isinstance(v, Literal) and taint[v]

    for eqn in jaxpr.eqns:
        inputs = [of(v) for v in eqn.invars]
        outputs = _outputs(eqn, inputs) if any(inputs) else [False] * len(eqn.outvars)
        taint |= dict(zip(eqn.outvars, outputs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, inputs)
    if name == "cond":
        if inputs[0]:
            return [True] * len(eqn.outvars)
        branches = [dependence(open_jaxpr(branch), inputs[1:]) for branch in eqn.params["branches"]]
        return [any(column) for column in zip(*branches, strict=True)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        # A reduction's jaxpr is no call: it sees its own results.
        if key in eqn.params and name not in ("reduce", "reduce_window"):
            inner = open_jaxpr(eqn.params[key])
            if len(inner.invars) == len(inputs) and len(inner.outvars) == len(eqn.outvars):
                return dependence(inner, inputs)
    return [True] * len(eqn.outvars)


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _scan(eqn: Any, inputs: list[bool]) -> list[bool]:
    body = open_jaxpr(eqn.params["jaxpr"])
    # Constants, carries, scanned arrays; these have a dimension more outside. JAX 0.12 names no
    # counts.
    num_carry = sum(_shape(o) == _shape(i) for o, i in zip(eqn.outvars, body.outvars, strict=True))
    num_scanned = sum(_shape(o) != _shape(i) for o, i in zip(eqn.invars, body.invars, strict=True))
    num_consts = len(inputs) - num_carry - num_scanned
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    scanned = inputs[num_consts + num_carry :]
    while True:
        outputs = dependence(body, [*consts, *carry, *scanned])
        grown = [a or b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        if grown == carry:
            return [*carry, *outputs[num_carry:]]
        carry = grown


def _select(jaxpr: ClosedJaxpr, outputs: Sequence[int]) -> Callable[[Sequence[Any]], Arrays]:
    """A function of the jaxpr's inputs that computes some of its outputs and nothing else."""
    used = [i in set(outputs) for i in range(len(jaxpr.jaxpr.outvars))]
    smaller, needed = pe.dce_jaxpr(jaxpr.jaxpr, used)
    order = {index: i for i, index in enumerate(i for i, u in enumerate(used) if u)}

    def run(inputs: Sequence[Any]) -> Arrays:
        arguments = [x for x, need in zip(inputs, needed, strict=True) if need]
        assert all(a is not None for a in arguments), (
            "a residual classed as independent reads the activation"
        )
        values = jax.core.eval_jaxpr(smaller, jaxpr.consts, *arguments)
        return [values[order[i]] for i in outputs]

    return run


class HalvedVjp(SplitVjp):
    """A `SplitVjp` whose backward is two functions, the second of which nobody waits for.

    Loops stay whole: gradients of weights that arise in one are computed with the input gradient,
    and stashed.

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

        def function(
            inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Any]
        ) -> Any:
            half = part(jaxpr, [*jaxpr.constvars, *inputs], equations, outputs)
            return lambda *args: jax.core.eval_jaxpr(
                half, (), *program.consts, *jax.tree.leaves(args)
            )

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


def _made_again(
    equations: Sequence[JaxprEqn], kept: Iterable[Var], cotangents: Iterable[Var]
) -> set[Var]:
    """Variables that the second half rather makes for itself than finds stashed.

    Those are what is made of weights alone, and the results of cheap equations on that, on
    residuals and on at most one variable that is stashed and takes no more room than what is made
    of it.
    """
    # For all that depends on activations: what has to be stashed so that it can be had, None if
    # nothing.
    source: dict[Var, Var | None] = dict.fromkeys(kept) | {v: v for v in cotangents}
    for eqn in equations:
        needed = {source[v] for v in variables(eqn.invars) if v in source}
        stashed = needed - {None}
        if (
            not is_cheap(eqn)
            or len(stashed) > 1
            or any(_size(s) > _size(v) for s in stashed for v in eqn.outvars)
        ):
            source.update((v, v) for v in eqn.outvars if needed)
        else:
            source.update((v, next(iter(stashed), None)) for v in eqn.outvars if needed)
    return {v for eqn in equations for v in eqn.outvars if source.get(v) is not v}


def _size(v: Any) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize
