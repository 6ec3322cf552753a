"""Second pass of slicing: code that no mark ties to a stage goes to the stages that need it.

What depends on inputs of the program only, through cheap operations (casts of weights, masks, dropout bits, constants),
may be computed anywhere, and is cheaper to compute again than to keep or to send. What is not cheap but depends on no
mark, such as a table computed before the first stage, is computed once, by the first computation that needs it.
Gradients of such code are computed where the gradients that they are made of arise.
"""

from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal, Var

from maxpipe.pipeline.jaxprs import is_cheap
from maxpipe.pipeline.mpmd.segments import Segments


@dataclass(frozen=True)
class Placement:
    """Where equations run.

    Attributes:
      home: for every variable that one computation computes, the index of that computation.
      anywhere: variables that every computation that needs them computes itself, inputs and constants included.
    """

    home: dict[Var, int]
    anywhere: set[Var]


def place_equations(flat: Any, cut: Segments) -> Placement:
    """Decides between one home and every user, for all equations."""
    anywhere: set[Var] = {*flat.jaxpr.invars, *flat.jaxpr.constvars}
    for eqn, _ in cut.equations:
        if is_cheap(eqn) and all(isinstance(v, Literal) or v in anywhere for v in eqn.invars):
            anywhere.update(eqn.outvars)
    home: dict[Var, int] = {}
    needed = dict(cut.marked)  # the earliest computation that needs a variable
    for eqn, segment in reversed(cut.equations):
        users = [needed[v] for v in eqn.outvars if v in needed]
        movable = cut.bound.isdisjoint(eqn.outvars) or anywhere.issuperset(eqn.outvars)
        at = min(users, default=segment) if movable else segment
        for v in eqn.invars:
            if not isinstance(v, Literal):
                needed[v] = min(at, needed.get(v, at))
        home.update((v, at) for v in eqn.outvars if v not in anywhere)
    _pull_back(cut, home, anywhere)
    return Placement(home, anywhere)


def _pull_back(cut: Segments, home: dict[Var, int], anywhere: set[Var]) -> None:
    """Cheap operations on gradients go where the gradients arise.

    The transpose of code before the first mark, such as a cast of all weights, is traced behind the last mark, and the
    gradients of all stages would travel there.
    """
    for eqn, segment in cut.equations:
        homes = {home[v] for v in eqn.invars if not isinstance(v, Literal) and v not in anywhere}
        if segment >= cut.num_chunks and homes and min(homes) >= cut.num_chunks and is_cheap(eqn):
            home.update((v, max(homes)) for v in eqn.outvars)
