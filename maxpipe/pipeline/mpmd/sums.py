"""Gradients of weights that several stages share: every stage adds up its own part, and the parts are added at the end.

Traced, the parts are added where the second one arises, and a part would travel through all stages between for every
microbatch.
"""

from jax.extend.core import JaxprEqn, Literal

from maxpipe.pipeline.jaxprs import Atom
from maxpipe.pipeline.mpmd.placement import Placement
from maxpipe.pipeline.mpmd.program import shape_of
from maxpipe.pipeline.mpmd.segments import Segments

_SUMS = ("add_any", "add")


def split_sums(cut: Segments, placement: Placement) -> list[tuple[Atom, ...]]:
    """For each output of the program, atoms whose sum it is: more than one if they arise in several computations.

    A sum is taken apart if it is the output alone that reads it and all of its terms have the output's shape.
    """
    made_by: dict[Atom, JaxprEqn] = {v: eqn for eqn, _ in cut.equations for v in eqn.outvars}
    uses: dict[Atom, int] = {}
    for atom in [*(v for eqn, _ in cut.equations for v in eqn.invars), *cut.outputs]:
        if not isinstance(atom, Literal):
            uses[atom] = uses.get(atom, 0) + 1

    def terms(atom: Atom) -> list[Atom]:
        eqn = None if isinstance(atom, Literal) else made_by.get(atom)
        if eqn is None or eqn.primitive.name not in _SUMS or uses[atom] > 1:
            return [atom]
        if any(shape_of(v).shape != shape_of(atom).shape for v in eqn.invars):
            return [atom]
        return [term for v in eqn.invars for term in terms(v)]

    parts = []
    for atom in cut.outputs:
        found = terms(atom)
        homes = {placement.home.get(term) for term in found if not isinstance(term, Literal)}
        parts.append(tuple(found) if len(homes) > 1 else (atom,))
    return parts
