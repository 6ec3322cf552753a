"""Third pass of slicing: every computation with what it reads and writes, without anything that nobody needs."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from maxpipe.pipeline.jaxprs import Atom
from maxpipe.pipeline.mpmd.placement import Placement
from maxpipe.pipeline.mpmd.program import Computation, Name
from maxpipe.pipeline.mpmd.segments import Segments


def assemble(
    flat: Any, cut: Segments, placement: Placement, parts: Sequence[Sequence[Atom]]
) -> dict[Name, Computation]:
    """Builds the computations from the last to the first, so that only what a later one reads is written.

    Args:
      flat, cut, placement: the program and what earlier passes found out about it.
      parts: for each output of the program, the atoms whose sum it is, from `split_sums`.
    """
    outputs = _outputs_of(cut, placement, parts)
    inputs = set(flat.jaxpr.invars)
    wanted: set[Var] = set()  # by later computations
    found: dict[Name, Computation] = {}
    for index in reversed(range(len(cut.names))):
        mine = outputs[index]
        writes = sorted((v for v in wanted if placement.home[v] == index), key=_order(cut))
        needed = {v for v in (*writes, *(a for p in mine.values() for a in p)) if not isinstance(v, Literal)}
        equations: list[JaxprEqn] = []
        for eqn, _ in reversed(cut.equations):
            here = all(v in placement.anywhere or placement.home[v] == index for v in eqn.outvars)
            if here and not needed.isdisjoint(eqn.outvars):
                equations.append(eqn)
                needed.difference_update(eqn.outvars)
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        arguments = [v for v in flat.jaxpr.invars if v in needed]
        reads = sorted(needed - inputs - set(flat.jaxpr.constvars), key=_order(cut))
        wanted.update(reads)
        name = cut.names[index]
        found[name] = Computation(name, tuple(equations[::-1]), tuple(reads), tuple(arguments), tuple(writes), mine)
    return dict(reversed(found.items()))


def _outputs_of(
    cut: Segments, placement: Placement, parts: Sequence[Sequence[Atom]]
) -> list[dict[int, tuple[Atom, ...]]]:
    """For each computation: the parts of outputs that it has at hand; what none computes goes to the last one."""
    segment_of = {v: segment for eqn, segment in cut.equations for v in eqn.outvars}
    last = len(cut.names) - 1
    found: list[dict[int, tuple[Atom, ...]]] = [{} for _ in cut.names]
    for output, atoms in enumerate(parts):
        for atom in atoms:
            known = last if isinstance(atom, Literal) else segment_of.get(atom, last)
            at = known if isinstance(atom, Literal) else placement.home.get(atom, known)
            found[at][output] = (*found[at].get(output, ()), atom)
    return found


def _order(cut: Segments) -> Callable[[Var], int]:
    """Sorting key: the place in the program."""
    place: dict[Var, int] = {v: i for i, (eqn, _) in enumerate(cut.equations) for v in eqn.outvars}
    return place.__getitem__
