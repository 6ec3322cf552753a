"""Flat programs: nested calls opened, so that marks and equations of interest are on one level.

First pass of slicing: which stage every equation of a marked program belongs to, by where it was
traced.

Second pass of slicing: code that no mark ties to a stage goes to the stages that need it.

What depends on inputs of the program only, through cheap operations (casts of weights, masks,
dropout bits, constants), may be computed anywhere, and is cheaper to compute again than to keep or
to send. What is not cheap but depends on no mark, such as a table computed before the first stage,
is computed once, by the first computation that needs it. Gradients of such code are computed where
the gradients that they are made of arise.

Gradients of weights that several stages share: every stage adds up its own part, and the parts are
added at the end.

Traced, the parts are added where the second one arises, and a part would travel through all stages
between for every microbatch.

Third pass of slicing: every computation with what it reads and writes, without anything that nobody
needs.

The backward of a stage in two: what the stage before waits for, and what nobody waits for.

A marked program, cut into computations of stages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from maxpipe.pipeline import jaxprs
from maxpipe.pipeline.engines.mpmd.marks import BACKWARD, FORWARD, mark_p
from maxpipe.pipeline.engines.mpmd.program import Computation, SlicedProgram, UnitName, shape_of
from maxpipe.pipeline.jaxprs import Atom, ancestors, is_cheap, read_by, variables


def inline(program: ClosedJaxpr, *, checkpoints: bool = False) -> ClosedJaxpr:
    """The same program without calls.

    Args:
      program: traced by `jax.make_jaxpr`.
      checkpoints: open the bodies of `jax.checkpoint` as well, so that what they compute again can
        be split.

    Raises:
      ValueError: a stage mark is inside a loop, a conditional or a checkpoint that stays closed.
    """
    flat = jaxprs.inline(
        program, jaxprs.CALLS + jaxprs.CHECKPOINTS if checkpoints else jaxprs.CALLS
    )
    for eqn in flat.jaxpr.eqns:
        if any(_has_mark(inner) for inner in jaxprs.inner_jaxprs(eqn)):
            raise ValueError(
                f"a stage mark lies inside {eqn.primitive.name}, which runs as a whole on one stage; "
                f"call mark_stage_boundary outside of it"
            )
    return flat


def _has_mark(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is mark_p or any(_has_mark(inner) for inner in jaxprs.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


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

    names: list[UnitName]
    equations: list[tuple[JaxprEqn, int]]
    outputs: list[Atom]
    num_chunks: int
    bound: set[Var]
    marked: dict[Var, int]


def segments(flat: Any) -> Segments:
    """Cuts at the marks.

    The last forward mark ends the last chunk's layers, and its backward mark begins their backward.
    What lies between the two, the loss and its gradient, is the end of the last chunk's forward:
    that is where schedules have it.

    Args:
      flat: closed jaxpr from `inline`: a forward, or a forward and its gradient.

    Raises:
      ValueError: there are no marks, the backward has not one for every one of the forward, or
        there are marks of tangents.
    """
    phases = [eqn.params["phase"] for eqn in flat.jaxpr.eqns if eqn.primitive is mark_p]
    count = phases.count(FORWARD)
    if not count:
        raise ValueError(
            "the program has no stage marks; call mark_stage_boundary between its stages"
        )
    if phases not in ([FORWARD] * count, [FORWARD] * count + [BACKWARD] * count):
        raise ValueError(
            f"{count} forward marks and {phases.count(BACKWARD)} backward ones in the order {phases}; every mark needs "
            f"an operand with a gradient, and a program with derivatives must be the gradient of a scalar"
        )
    names = [UnitName("F", c) for c in range(count)]
    if BACKWARD in phases:
        names += [UnitName("B", c) for c in reversed(range(count))]
    renamed: dict[Any, Atom] = {}
    bound: set[Var] = set()
    marked: dict[Var, int] = {}

    def resolve(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else renamed.get(atom, atom)

    equations, passed = [], 0
    for eqn in flat.jaxpr.eqns:
        inputs = [resolve(v) for v in eqn.invars]
        at = passed if passed < count else passed - 1
        if eqn.primitive is mark_p or any(
            v in bound for v in eqn.invars if not isinstance(v, Literal)
        ):
            bound.update(eqn.outvars)
        if eqn.primitive is mark_p:
            for v in inputs:
                if not isinstance(v, Literal):
                    marked.setdefault(v, at)
            passed += 1
            renamed.update(zip(eqn.outvars, inputs, strict=True))
            continue
        equations.append((eqn.replace(invars=inputs), at))
    return Segments(
        names, equations, [resolve(v) for v in flat.jaxpr.outvars], count, bound, marked
    )


@dataclass(frozen=True)
class Placement:
    """Where equations run.

    Attributes:
      home: for every variable that one computation computes, the index of that computation.
      anywhere: variables that every computation that needs them computes itself, inputs and
        constants included.
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

    The transpose of code before the first mark, such as a cast of all weights, is traced behind the
    last mark, and the gradients of all stages would travel there.
    """
    for eqn, segment in cut.equations:
        homes = {home[v] for v in eqn.invars if not isinstance(v, Literal) and v not in anywhere}
        if segment >= cut.num_chunks and homes and min(homes) >= cut.num_chunks and is_cheap(eqn):
            home.update((v, max(homes)) for v in eqn.outvars)


_SUMS = ("add_any", "add")


def split_sums(cut: Segments, placement: Placement) -> list[tuple[Atom, ...]]:
    """For each output of the program, atoms whose sum it is: more than one if they arise in several computations.

    A sum is taken apart if it is the output alone that reads it and all of its terms have the
    output's shape.
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


def assemble(
    flat: Any, cut: Segments, placement: Placement, parts: Sequence[Sequence[Atom]]
) -> dict[UnitName, Computation]:
    """Builds the computations from the last to the first, so that only what a later one reads is written.

    Args:
      flat, cut, placement: the program and what earlier passes found out about it.
      parts: for each output of the program, the atoms whose sum it is, from `split_sums`.
    """
    outputs = _outputs_of(cut, placement, parts)
    inputs = set(flat.jaxpr.invars)
    wanted: set[Var] = set()  # by later computations
    found: dict[UnitName, Computation] = {}
    for index in reversed(range(len(cut.names))):
        mine = outputs[index]
        writes = sorted((v for v in wanted if placement.home[v] == index), key=_order(cut))
        needed = {
            v
            for v in (*writes, *(a for p in mine.values() for a in p))
            if not isinstance(v, Literal)
        }
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
        found[name] = Computation(
            name, tuple(equations[::-1]), tuple(reads), tuple(arguments), tuple(writes), mine
        )
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


def split_backwards(computations: Mapping[UnitName, Computation]) -> dict[UnitName, Computation]:
    """Every B as an I and a W that follows it; an order that respects dependencies stays one."""
    found: dict[UnitName, Computation] = {}
    for name, computation in computations.items():
        halves = split_backward(computation) if name.kind == "B" else (computation,)
        found.update((half.name, half) for half in halves)
    return found


def split_backward(backward: Computation) -> tuple[Computation, Computation]:
    """Splits a B by dependency: I is everything that the values for other stages depend on, W everything else.

    The first chunk has no stage before it. Its last equation that is not cheap is the end of the
    way back, such as the gradient of an embedding before casts and layout constraints, and what
    that one reads takes the place of the input gradient.
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

    def half(
        kind: str, equations: Sequence[JaxprEqn], extra: Sequence[Var], writes: Iterable[Var]
    ) -> Computation:
        parts = {
            i: tuple(atom for atom in atoms if is_late(atom) == (kind == "W"))
            for i, atoms in backward.outputs.items()
        }
        parts = {i: atoms for i, atoms in parts.items() if atoms}
        read = read_by(equations, (atom for atoms in parts.values() for atom in atoms))
        return Computation(
            UnitName(kind, backward.name.chunk),
            tuple(equations),
            (*(v for v in backward.reads if v in read), *extra),
            tuple(v for v in backward.arguments if v in read),
            tuple(writes),
            parts,
        )

    writes = dict.fromkeys([*backward.writes, *kept])
    return half("I", first, (), writes), half("W", second, kept, ())


def _anywhere(computation: Computation) -> set[Var]:
    """Variables that cost less to compute twice than to keep: cheap ones that depend on no other computation."""
    bound = set(computation.reads)
    for eqn in computation.equations:
        if not is_cheap(eqn) or any(v in bound for v in variables(eqn.invars)):
            bound.update(eqn.outvars)
    return {v for eqn in computation.equations for v in eqn.outvars} - bound


def slice_program(program: Any, *, split_backward: bool = False) -> SlicedProgram:
    """Cuts a program at its stage marks.

    A program with G marks has G chunks: a mark follows each, also the last, behind which stands the
    loss. Of a gradient, chunk c becomes computations F and B; of a forward alone, F.

    Args:
      program: closed jaxpr of a forward, or of `jax.value_and_grad` of one.
      split_backward: B becomes I, which computes what the stage before waits for, and W, which
        computes the rest.

    Raises:
      ValueError: the marks do not cut the program into stages; see `inline` and `segments`.
    """
    flat = inline(program, checkpoints=split_backward)
    cut = segments(flat)
    placement = place_equations(flat, cut)
    computations = assemble(flat, cut, placement, split_sums(cut, placement))
    if split_backward:
        computations = split_backwards(computations)
    return SlicedProgram(flat, cut.num_chunks, computations)
