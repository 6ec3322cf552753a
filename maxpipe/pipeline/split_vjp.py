"""Split the vjp of a chunk over time: forward and backward, and the backward into I and W.

A pipeline runs other units between the forward of a chunk and its backward, so what the two have in
common is stored, once for every unit in flight. Dependence in the traced program tells which values
these are; the identity of tracers does not, since casts and loops make new values out of weights.

`SplitVjp` cuts `jax.vjp` into a forward F and a backward B:

    residuals that depend on the activation          F returns them and B takes them
    residuals that do not (weights, their casts      B computes them again from the weights and the
    and gathered copies, masks, dropout bits)        other inputs, which it has anyway; storing them
                                                     would hold a copy of the weights for every unit

`SplitBackwardVjp` also cuts the backward into the input gradient I and the weight gradients W, as
zero bubble schedules do (Qi et al., arXiv:2401.10241, whose B is our I). The traced backward is one
list of equations:

    I      the equations that the input gradient depends on
    W      the equations that the weight gradients depend on, back to results of I worth storing
    stash  these results, mostly gradients of the outputs of matrix products: I returns them and W
           takes them

Both halves compute what is cheap (norms, activation functions, casts, gradients through a gate) and
what depends on weights alone, so matrix products are computed once and little is stashed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval as pe

from maxpipe.pipeline.jaxprs import (
    CALLS,
    CHECKPOINTS,
    Atom,
    ancestors,
    inline,
    is_cheap,
    open_jaxpr,
    part,
    read_by,
    shaped,
    variables,
)

Arrays = list[jax.Array]
Weights = TypeVar("Weights")  # a pytree of arrays, like the next two
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


class SplitVjp(Generic[Weights, Inputs, Outputs]):
    """Forward and backward of `f(x, weights, inputs)`, two functions that share a list of arrays.

    Args:
      f: pure function of an activation `x` (one array), a pytree `weights`, and a pytree `inputs`
        that has no gradient; traced with arrays or shapes.

    Attributes:
      residuals: shapes of what `forward` hands to `backward`: the residuals that depend on `x`,
        each once.
      outputs: shapes of the outputs of f, and of their cotangents.
    """

    def __init__(
        self,
        f: Callable[[jax.Array, Weights, Inputs], Outputs],
        x: jax.Array | jax.ShapeDtypeStruct,
        weights: Weights,
        inputs: Inputs,
    ):
        # 1. Trace the forward with all residuals: the vjp of f is a pytree of them.
        def forward(
            x: jax.Array, weights: Weights, inputs: Inputs
        ) -> tuple[Outputs, Callable[..., tuple[jax.Array, Weights]]]:
            return jax.vjp(lambda x, weights: f(x, weights, inputs), x, weights)

        traced, (self.outputs, vjp) = jax.make_jaxpr(forward, return_shape=True)(x, weights, inputs)
        self._vjp_structure = jax.tree.structure(vjp)
        num_outputs = len(jax.tree.leaves(self.outputs))

        # 2. Give every residual that depends on x, the first argument, a place among the stored
        # ones; None stands for one that the backward computes again.
        only_x = [True] + [False] * (len(traced.jaxpr.invars) - 1)
        depends = dependence(traced.jaxpr, only_x)[num_outputs:]
        places: dict[Atom, int] = {}
        self._places = [
            places.setdefault(residual, len(places)) if depends_on_x else None
            for residual, depends_on_x in zip(
                traced.jaxpr.outvars[num_outputs:], depends, strict=True
            )
        ]

        # 3. Cut out a program for each class.
        stored = [num_outputs + self._places.index(place) for place in range(len(places))]
        recomputed = [num_outputs + i for i, place in enumerate(self._places) if place is None]
        self._forward = _select(traced, [*range(num_outputs), *stored])
        self._recompute = _select(traced, recomputed)
        self.residuals = [shaped(traced.jaxpr.outvars[i]) for i in stored]

    def forward(self, x: jax.Array, weights: Weights, inputs: Inputs) -> tuple[Outputs, Arrays]:
        """Return (outputs of f, residuals)."""
        flat = self._forward([x, *jax.tree.leaves((weights, inputs))])
        outputs, structure = jax.tree.flatten(self.outputs)
        return jax.tree.unflatten(structure, flat[: len(outputs)]), flat[len(outputs) :]

    def backward(
        self, residuals: Sequence[jax.Array], weights: Weights, inputs: Inputs, cotangent: Outputs
    ) -> tuple[jax.Array, Weights]:
        """Return the gradients (of x, of the weights), given the cotangent of the outputs."""
        recomputed = iter(self._recompute([None, *jax.tree.leaves((weights, inputs))]))
        leaves = [next(recomputed) if place is None else residuals[place] for place in self._places]
        return jax.tree.unflatten(self._vjp_structure, leaves)(cotangent)


class SplitBackwardVjp(SplitVjp[Weights, Inputs, Outputs]):
    """A `SplitVjp` whose backward is two functions: input gradient, then weight gradients.

    Loops stay in one piece: gradients of weights that arise in a loop are computed with the input
    gradient, and stashed.

    Attributes:
      stash: shapes of what `input_gradient` hands to `weight_gradients`, each once.
    """

    def __init__(
        self,
        f: Callable[[jax.Array, Weights, Inputs], Outputs],
        x: jax.Array | jax.ShapeDtypeStruct,
        weights: Weights,
        inputs: Inputs,
    ):
        super().__init__(f, x, weights, inputs)
        # 1. Trace the backward, with calls and rematerialised parts inlined, so that their
        # equations can be told apart.
        operands = (self.residuals, weights, inputs)
        traced, (_, weight_shapes) = jax.make_jaxpr(self.backward, return_shape=True)(
            *operands, self.outputs
        )
        program = inline(traced, CALLS + CHECKPOINTS)
        jaxpr = program.jaxpr
        num_operands = len(jax.tree.leaves(operands))
        operand_variables, cotangents = jaxpr.invars[:num_operands], jaxpr.invars[num_operands:]
        dx, *dw = jaxpr.outvars

        # 2. I is all that dx depends on.
        input_equations = ancestors(jaxpr.eqns, [dx])

        # 3. W is all that dw depends on, back to results of I, except for those that W recomputes.
        recomputed = _recomputed(jaxpr.eqns, operand_variables[: len(self.residuals)], cotangents)
        results = {*cotangents, *(v for eqn in input_equations for v in eqn.outvars)} - recomputed
        remaining = [eqn for eqn in jaxpr.eqns if results.isdisjoint(eqn.outvars)]
        weight_equations = ancestors(remaining, dw)
        stash = [v for v in read_by(weight_equations, dw) if v in results]

        # 4. Make a function of each half.
        def function(
            inputs: Sequence[Var], equations: Sequence[JaxprEqn], outputs: Sequence[Atom]
        ) -> Callable[..., Arrays]:
            half = part(jaxpr, [*jaxpr.constvars, *inputs], equations, outputs)
            return lambda *args: jax.core.eval_jaxpr(
                half, (), *program.consts, *jax.tree.leaves(args)
            )

        self.stash = [shaped(v) for v in stash]
        self._input_gradient = function(jaxpr.invars, input_equations, [dx, *stash])
        self._weight_gradients = function([*operand_variables, *stash], weight_equations, dw)
        self._weights_structure = jax.tree.structure(weight_shapes)

    def input_gradient(
        self, residuals: Sequence[jax.Array], weights: Weights, inputs: Inputs, cotangent: Outputs
    ) -> tuple[jax.Array, Arrays]:
        dx, *stash = self._input_gradient(residuals, weights, inputs, cotangent)
        return dx, stash

    def weight_gradients(
        self,
        residuals: Sequence[jax.Array],
        weights: Weights,
        inputs: Inputs,
        stash: Sequence[jax.Array],
    ) -> Weights:
        """Return the gradients of the weights, from what `input_gradient` stashed."""
        dw = self._weight_gradients(residuals, weights, inputs, stash)
        return jax.tree.unflatten(self._weights_structure, dw)


def dependence(jaxpr: Jaxpr, tainted: Sequence[bool]) -> list[bool]:
    """Return for each output of a jaxpr whether it may depend on a tainted input.

    Looks into loops, conditionals and calls, so that an output of a scan that only passes weights
    through is distinguished from one that carries activations.
    """
    taint = dict(zip(jaxpr.invars, tainted, strict=True)) | dict.fromkeys(jaxpr.constvars, False)

    def is_tainted(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and taint[atom]

    for eqn in jaxpr.eqns:
        inputs = [is_tainted(v) for v in eqn.invars]
        outputs = _equation_dependence(eqn, inputs) if any(inputs) else [False] * len(eqn.outvars)
        taint |= dict(zip(eqn.outvars, outputs, strict=True))
    return [is_tainted(v) for v in jaxpr.outvars]


def _equation_dependence(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name == "scan":
        return _scan_dependence(eqn, inputs)
    if name == "cond":
        # The first input chooses the branch, and with it every output.
        if inputs[0]:
            return [True] * len(eqn.outvars)
        branches = [dependence(open_jaxpr(branch), inputs[1:]) for branch in eqn.params["branches"]]
        return [any(column) for column in zip(*branches, strict=True)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        # The jaxpr of a reduction is not a call: it combines two partial results.
        if key in eqn.params and name not in ("reduce", "reduce_window"):
            body = open_jaxpr(eqn.params[key])
            if len(body.invars) == len(inputs) and len(body.outvars) == len(eqn.outvars):
                return dependence(body, inputs)
    return [True] * len(eqn.outvars)


def _scan_dependence(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    """Return the same for a scan, where an input may reach a carry only after many iterations."""
    body = open_jaxpr(eqn.params["jaxpr"])
    # Inputs are constants, carries and scanned arrays. Only scanned arrays have one dimension more
    # outside the body than inside. Shapes tell them apart, since JAX 0.12 does not give the counts.
    num_carry = _count_equal_shapes(eqn.outvars, body.outvars)
    num_scanned = len(inputs) - _count_equal_shapes(eqn.invars, body.invars)
    num_consts = len(inputs) - num_carry - num_scanned
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    scanned = inputs[num_consts + num_carry :]
    # Repeat until an iteration taints no further carry.
    while True:
        outputs = dependence(body, [*consts, *carry, *scanned])
        new_carry = [a or b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        if new_carry == carry:
            return [*carry, *outputs[num_carry:]]
        carry = new_carry


def _count_equal_shapes(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
    return sum(shaped(a).shape == shaped(b).shape for a, b in zip(outer, inner, strict=True))


def _select(
    jaxpr: ClosedJaxpr, outputs: Sequence[int]
) -> Callable[[Sequence[jax.Array | None]], Arrays]:
    """Return a function of the jaxpr's inputs that computes some of its outputs and nothing else.

    An input that these outputs do not depend on may be None.
    """
    is_used = [i in set(outputs) for i in range(len(jaxpr.jaxpr.outvars))]
    smaller, is_needed = pe.dce_jaxpr(jaxpr.jaxpr, is_used)
    position = {output: i for i, output in enumerate(sorted(set(outputs)))}

    def run(inputs: Sequence[jax.Array | None]) -> Arrays:
        arguments = [x for x, needed in zip(inputs, is_needed, strict=True) if needed]
        assert all(a is not None for a in arguments), (
            "a residual classed as independent reads the activation"
        )
        values = jax.core.eval_jaxpr(smaller, jaxpr.consts, *arguments)
        return [values[position[i]] for i in outputs]

    return run


def _recomputed(
    equations: Sequence[JaxprEqn], residuals: Iterable[Var], cotangents: Iterable[Var]
) -> set[Var]:
    """Return the variables that W computes again instead of taking them from the stash.

    These are all that depend on weights alone, and the results of cheap equations on such
    variables, on residuals and on at most one stashed variable, which must be no larger than the
    result.
    """
    # For each variable that depends on activations: the stashed variable from which it can be
    # computed again; None if none is needed; itself if it has to be stashed.
    source: dict[Var, Var | None] = dict.fromkeys(residuals) | {v: v for v in cotangents}
    for eqn in equations:
        sources = {source[v] for v in variables(eqn.invars) if v in source}
        if not sources:
            continue
        stashed = [v for v in sources if v is not None]
        is_no_larger = all(_num_bytes(s) <= _num_bytes(v) for s in stashed for v in eqn.outvars)
        if is_cheap(eqn) and len(stashed) <= 1 and is_no_larger:
            source.update(dict.fromkeys(eqn.outvars, stashed[0] if stashed else None))
        else:
            source.update((v, v) for v in eqn.outvars)
    return {v for eqn in equations for v in eqn.outvars if source.get(v) is not v}


def _num_bytes(variable: Var) -> int:
    aval = shaped(variable)
    return math.prod(aval.shape) * aval.dtype.itemsize
