"""First pass of slicing: which stage every equation of a marked program belongs to, by where it was traced."""

from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from maxpipe.pipeline.jaxprs import Atom
from maxpipe.pipeline.mpmd.marks import BACKWARD, FORWARD, mark_p
from maxpipe.pipeline.mpmd.program import Name


@dataclass(frozen=True)
class Segments:
    """A flat program without its marks.

    Attributes:
      names: the computations, in the order in which they depend on each other.
      equations: (equation, index into `names`) in the order of the program.
      outputs: of the program.
      num_chunks: G, one for every mark of the forward.
      bound: variables that depend on what a mark let through, and so on the work of a stage.
      marked: for variables that a mark let through, the computation that ends there.
    """

    names: list[Name]
    equations: list[tuple[JaxprEqn, int]]
    outputs: list[Atom]
    num_chunks: int
    bound: set[Var]
    marked: dict[Var, int]


def segments(flat: Any) -> Segments:
    """Cuts at the marks.

    The last forward mark ends the last chunk's layers, and its backward mark begins their backward. What lies between
    the two, the loss and its gradient, is the end of the last chunk's forward: that is where schedules have it.

    Args:
      flat: closed jaxpr from `inline`: a forward, or a forward and its gradient.

    Raises:
      ValueError: there are no marks, the backward has not one for every one of the forward, or there are marks of
        tangents.
    """
    phases = [eqn.params["phase"] for eqn in flat.jaxpr.eqns if eqn.primitive is mark_p]
    count = phases.count(FORWARD)
    if not count:
        raise ValueError("the program has no stage marks; call mark_stage_boundary between its stages")
    if phases not in ([FORWARD] * count, [FORWARD] * count + [BACKWARD] * count):
        raise ValueError(
            f"{count} forward marks and {phases.count(BACKWARD)} backward ones in the order {phases}; every mark needs "
            f"an operand with a gradient, and a program with derivatives must be the gradient of a scalar"
        )
    names = [Name("F", c) for c in range(count)]
    if BACKWARD in phases:
        names += [Name("B", c) for c in reversed(range(count))]
    renamed: dict[Any, Atom] = {}
    bound: set[Var] = set()
    marked: dict[Var, int] = {}

    def resolve(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    equations, passed = [], 0
    for eqn in flat.jaxpr.eqns:
        inputs = [resolve(v) for v in eqn.invars]
        at = passed if passed < count else passed - 1
        if eqn.primitive is mark_p or any(v in bound for v in eqn.invars if not isinstance(v, Literal)):
            bound.update(eqn.outvars)
        if eqn.primitive is mark_p:
            for v in inputs:
                if not isinstance(v, Literal):
                    marked.setdefault(v, at)
            passed += 1
            renamed.update(zip(eqn.outvars, inputs, strict=True))
            continue
        equations.append((eqn.replace(invars=inputs), at))
    return Segments(names, equations, [resolve(v) for v in flat.jaxpr.outvars], count, bound, marked)
