"""The backward of a stage in two: what the stage before waits for, and what nobody waits for."""

from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from maxpipe.pipeline.jaxprs import Atom, ancestors, is_cheap, read_by, variables
from maxpipe.pipeline.mpmd.program import Computation, Name


def split_backwards(computations: Mapping[Name, Computation]) -> dict[Name, Computation]:
    """Every B as an I and a W that follows it; an order that respects dependencies stays one."""
    found: dict[Name, Computation] = {}
    for name, computation in computations.items():
        halves = split_backward(computation) if name.kind == "B" else (computation,)
        found.update((half.name, half) for half in halves)
    return found


def split_backward(backward: Computation) -> tuple[Computation, Computation]:
    """Splits a B by dependency: I is everything that the values for other stages depend on, W everything else.

    The first chunk has no stage before it. Its last equation that is not cheap is the end of the way back, such as the
    gradient of an embedding before casts and layout constraints, and what that one reads takes the place of the input
    gradient.
    """
    again = _anywhere(backward)
    ends: Iterable[Atom] = backward.writes
    if not ends:
        last = next((eqn for eqn in reversed(backward.equations) if not is_cheap(eqn)), None)
        ends = [v for v in last.invars if isinstance(v, Literal) or v not in again] if last else ()
    first = ancestors(backward.equations, ends)
    done = {v for eqn in first for v in eqn.outvars} - again

    def is_late(atom: Atom) -> bool:
        return isinstance(atom, Literal) or atom not in done

    late = [atom for atoms in backward.outputs.values() for atom in atoms if is_late(atom)]
    second = ancestors([eqn for eqn in backward.equations if done.isdisjoint(eqn.outvars)], late)
    kept = [v for v in read_by(second, late) if v in done]

    def half(kind: str, equations: Sequence[JaxprEqn], extra: Sequence[Var], writes: Iterable[Var]) -> Computation:
        parts = {
            i: tuple(atom for atom in atoms if is_late(atom) == (kind == "W"))
            for i, atoms in backward.outputs.items()
        }
        parts = {i: atoms for i, atoms in parts.items() if atoms}
        read = read_by(equations, (atom for atoms in parts.values() for atom in atoms))
        return Computation(
            Name(kind, backward.name.chunk), tuple(equations),
            (*(v for v in backward.reads if v in read), *extra),
            tuple(v for v in backward.arguments if v in read), tuple(writes), parts,
        )  # fmt: skip

    writes = dict.fromkeys([*backward.writes, *kept])
    return half("I", first, (), writes), half("W", second, kept, ())


def _anywhere(computation: Computation) -> set[Var]:
    """Variables that cost less to compute twice than to keep: cheap ones that depend on no other computation."""
    bound = set(computation.reads)
    for eqn in computation.equations:
        if not is_cheap(eqn) or any(v in bound for v in variables(eqn.invars)):
            bound.update(eqn.outvars)
    return {v for eqn in computation.equations for v in eqn.outvars} - bound
