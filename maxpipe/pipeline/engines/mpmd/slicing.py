"""Cut a traced program at its stage marks into one computation per chunk and direction.

The passes, in the order in which `slice_program` calls them:

1. `open_calls` replaces nested calls by their bodies.
2. `find_segments` removes the marks; an equation belongs to the segment between two marks.
3. `place_equations` gives code that no mark ties to a segment to the computations that read it.
4. `split_sums` takes apart gradients of weights that several stages share, one part per stage.
5. `assemble_computations` collects what each computation runs, reads and writes; drops dead code.
6. `split_backward` splits each backward B into I and W, if the schedule asks for it.

An example is `loss = sum(mark(mark(sin(c @ a)) @ b))` and its gradients for a and b. After pass 1
it is the equations on the left; on the right are the computations that run them after pass 5 (F0:
forward of chunk 0, B0: its backward) and after pass 6 (I0: gradient of its input, W0: of weights).

    d = dot_general c a            | F0 | F0
    e = sin d                      | F0 | F0
    f = cos d                      | B0 | I0     tied to no mark: moved to its reader (pass 3)
    g = stage_boundary[forward] e
    h = dot_general g b            | F1 | F1
    i = stage_boundary[forward] h
    j = reduce_sum i               | F1 | F1     the loss is the end of the last forward
    k = broadcast_in_dim 1.0       | B1 | I1 W1  cheap: each reader computes it (pass 3)
    l = stage_boundary[backward] k
    m = dot_general l g            | B1 | W1
    n = transpose m                | B1 | W1     gradient of b
    o = dot_general l b            | B1 | I1     all that stage 0 waits for
    p = stage_boundary[backward] o
    q = mul p f                    | B0 | I0
    r = dot_general q c            | B0 | W0
    s = transpose r                | B0 | W0     gradient of a
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from maxpipe.pipeline import jaxprs
from maxpipe.pipeline.engines.mpmd.marks import (
    BACKWARD,
    FORWARD,
    check_marks_are_open,
    check_phases,
    mark_p,
)
from maxpipe.pipeline.engines.mpmd.program import Computation, SlicedProgram, UnitName, shape_of
from maxpipe.pipeline.jaxprs import (
    Atom,
    ancestors,
    calls_back,
    is_cheap_or_collective,
    read_by,
    variables,
)

Outputs = dict[int, tuple[Atom, ...]]  # index of an output -> atoms whose sum is (a part of) it


# Pass 1: open calls.
def open_calls(
    program: ClosedJaxpr,
    *,
    checkpoints: bool = False,
    make_jaxpr: Callable[..., Callable[..., ClosedJaxpr]] = jax.make_jaxpr,
) -> ClosedJaxpr:
    """Return the program with nested calls replaced by their bodies.

    With `checkpoints` the bodies of `jax.checkpoint` are opened as well, so that pass 6 can divide
    the recomputed forward.
    """
    check_marks_are_open(program)
    calls = jaxprs.CALLS + jaxprs.CHECKPOINTS if checkpoints else jaxprs.CALLS
    return jaxprs.inline(program, calls, make_jaxpr)


# Pass 2: find segments.
@dataclass(frozen=True)
class Segments:
    """A flat program without its marks. A segment has the index of its computation.

    Attributes:
      names: the computations, in an order that respects their dependencies.
      equations: (equation, segment in which it was traced), in the order of the program.
      tied: variables that depend on a mark's results, and so on the work of a stage.
      marked: for each operand of a mark, the segment that ends there.
    """

    names: list[UnitName]
    equations: list[tuple[JaxprEqn, int]]
    outputs: list[Atom]
    num_chunks: int
    tied: set[Var]
    marked: dict[Var, int]


def find_segments(flat: ClosedJaxpr) -> Segments:
    """Cut a flat program, a forward or a forward and its gradient, at its marks.

    The last forward mark ends the last chunk's layers, and its backward mark begins their backward.
    The loss and its gradient, between the two, belong to the last chunk's forward, as in schedules.
    """
    check_phases(flat)
    phases = [eqn.params["phase"] for eqn in flat.jaxpr.eqns if eqn.primitive is mark_p]
    num_chunks = phases.count(FORWARD)
    names = [UnitName("F", chunk) for chunk in range(num_chunks)]
    if BACKWARD in phases:
        names += [UnitName("B", chunk) for chunk in reversed(range(num_chunks))]
    original: dict[Var, Atom] = {}  # result of a mark -> its operand
    tied: set[Var] = set()
    marked: dict[Var, int] = {}
    equations: list[tuple[JaxprEqn, int]] = []
    marks_passed = 0

    def resolve(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else original.get(atom, atom)

    for eqn in flat.jaxpr.eqns:
        segment = marks_passed if marks_passed < num_chunks else marks_passed - 1
        operands = list(map(resolve, eqn.invars))
        if eqn.primitive is mark_p or not tied.isdisjoint(variables(eqn.invars)):
            tied.update(eqn.outvars)
        if eqn.primitive is mark_p:
            for v in variables(operands):
                marked.setdefault(v, segment)
            original.update(zip(eqn.outvars, operands, strict=True))
            marks_passed += 1
        else:
            equations.append((eqn.replace(invars=operands), segment))
    outputs = list(map(resolve, flat.jaxpr.outvars))
    return Segments(names, equations, outputs, num_chunks, tied, marked)


# Pass 3: place equations.
@dataclass(frozen=True)
class Placement:
    """Where equations run.

    Attributes:
      home: for each variable that a single computation computes, the index of that computation.
      anywhere: variables that each reader has or computes itself: inputs, constants, and what
        follows from them by operations that cost less than keeping or sending the result (casts of
        weights, masks, dropout bits).
    """

    home: dict[Var, int]
    anywhere: set[Var]


def place_equations(flat: ClosedJaxpr, segments: Segments) -> Placement:
    # 1. Cheap operations on inputs alone run in each computation that reads their results.
    anywhere: set[Var] = {*flat.jaxpr.invars, *flat.jaxpr.constvars}
    for eqn, _ in segments.equations:
        if is_cheap_or_collective(eqn) and anywhere.issuperset(variables(eqn.invars)):
            anywhere.update(eqn.outvars)
    # 2. Equations tied to a stage stay in their segment. All others, such as a table computed
    #    before the first mark, go to their first reader.
    home: dict[Var, int] = {}
    first_reader = dict(segments.marked)
    for eqn, segment in reversed(segments.equations):
        readers = [first_reader[v] for v in eqn.outvars if v in first_reader]
        is_tied = not segments.tied.isdisjoint(eqn.outvars)
        movable = not is_tied or anywhere.issuperset(eqn.outvars)
        computation = min(readers, default=segment) if movable else segment
        for v in variables(eqn.invars):
            first_reader[v] = min(computation, first_reader.get(v, computation))
        home.update((v, computation) for v in eqn.outvars if v not in anywhere)
    # 3. Cheap operations on gradients go where the gradients arise. The transpose of code before
    #    the first mark, such as a cast of all weights, is traced after the last mark, and the
    #    gradients of all stages would travel there.
    for eqn, segment in segments.equations:
        sources = {home[v] for v in variables(eqn.invars) if v not in anywhere}
        is_backward = segment >= segments.num_chunks and bool(sources)
        if is_backward and min(sources) >= segments.num_chunks and is_cheap_or_collective(eqn):
            home.update((v, max(sources)) for v in eqn.outvars)
    return Placement(home, anywhere)


# Pass 4: split sums.
def split_sums(segments: Segments, placement: Placement) -> list[Outputs]:
    """Return for each computation the terms that it adds to outputs of the program, by output.

    The gradient of a weight that several stages share is traced as a sum where its second term
    arises; the first term would travel there for every microbatch. Instead each stage adds up its
    own terms over the microbatches, and the engine adds the totals. A sum is taken apart if its
    terms arise in several computations, only the output reads it, and all terms have its shape.
    """
    traced = {v: (eqn, segment) for eqn, segment in segments.equations for v in eqn.outvars}
    operands = (v for eqn, _ in segments.equations for v in eqn.invars)
    num_reads = Counter(variables([*operands, *segments.outputs]))

    def terms_of(atom: Atom) -> list[Atom]:
        if isinstance(atom, Literal) or atom not in traced or num_reads[atom] > 1:
            return [atom]
        eqn, _ = traced[atom]
        if eqn.primitive.name not in ("add", "add_any"):
            return [atom]
        if any(shape_of(v).shape != shape_of(atom).shape for v in eqn.invars):
            return [atom]
        return [term for v in eqn.invars for term in terms_of(v)]

    last = len(segments.names) - 1  # gets outputs that are literals or inputs
    parts: list[Outputs] = [{} for _ in segments.names]
    for output, atom in enumerate(segments.outputs):
        terms = terms_of(atom)
        if len({placement.home.get(term) for term in variables(terms)}) < 2:
            terms = [atom]
        for term in terms:
            index = last
            if not isinstance(term, Literal) and term in traced:
                index = placement.home.get(term, traced[term][1])
            parts[index][output] = (*parts[index].get(output, ()), term)
    return parts


# Pass 5: assemble computations.
def assemble_computations(
    flat: ClosedJaxpr, segments: Segments, placement: Placement, outputs: Sequence[Outputs]
) -> dict[UnitName, Computation]:
    """Build the computations from the last to the first; each writes what a later one reads."""
    in_order = [v for eqn, _ in segments.equations for v in eqn.outvars]
    position = {v: i for i, v in enumerate(in_order)}.__getitem__
    inputs_and_constants = {*flat.jaxpr.invars, *flat.jaxpr.constvars}
    read_later: set[Var] = set()
    computations: dict[UnitName, Computation] = {}
    for index, name in reversed(list(enumerate(segments.names))):
        writes = sorted((v for v in read_later if placement.home[v] == index), key=position)
        # Walk back from the results and collect the equations that they depend on.
        live = {*writes, *variables(atom for atoms in outputs[index].values() for atom in atoms)}
        equations: list[JaxprEqn] = []
        for eqn, segment in reversed(segments.equations):
            is_here = all(placement.home.get(v, index) == index for v in eqn.outvars)
            # A callback without results, such as jax.debug.print, stays where it was traced.
            runs_alone = calls_back(eqn) and (bool(eqn.outvars) or segment == index)
            if is_here and (runs_alone or not live.isdisjoint(eqn.outvars)):
                equations.append(eqn)
                live.difference_update(eqn.outvars)
                live.update(variables(eqn.invars))
        # What is live before the first equation comes from other computations or is an input.
        reads = sorted(live - inputs_and_constants, key=position)
        read_later.update(reads)
        computations[name] = Computation(
            name,
            equations=tuple(reversed(equations)),
            reads=tuple(reads),
            arguments=tuple(v for v in flat.jaxpr.invars if v in live),
            writes=tuple(writes),
            outputs=outputs[index],
        )
    return dict(reversed(computations.items()))


# Pass 6: split the backward.
def split_backward(backward: Computation) -> tuple[Computation, Computation]:
    """Split a B into I, which computes the values for other computations, and W, all the rest.

    The first chunk sends no input gradient. Its last equation that is not cheap is the end of the
    way back, such as the gradient of an embedding before casts and layout constraints, and the
    operands of that equation take the place of the input gradient.
    """
    # 1. I runs what its results depend on.
    recomputable = _recomputable(backward)
    ends: Iterable[Atom] = backward.writes
    if not ends:
        costly = [eqn for eqn in backward.equations if not is_cheap_or_collective(eqn)]
        ends = [v for v in variables(costly[-1].invars) if v not in recomputable] if costly else ()
    first = ancestors(backward.equations, ends)
    computed_first = {v for eqn in first for v in eqn.outvars} - recomputable

    def is_late(term: Atom) -> bool:
        return isinstance(term, Literal) or term not in computed_first

    # 2. W runs what the remaining outputs depend on, and reads the part that I has computed.
    late_terms = [term for terms in backward.outputs.values() for term in terms if is_late(term)]
    remaining = [eqn for eqn in backward.equations if computed_first.isdisjoint(eqn.outvars)]
    second = ancestors(remaining, late_terms, with_callbacks=True)
    handed_over = [v for v in read_by(second, late_terms) if v in computed_first]

    def half(
        kind: str, equations: Sequence[JaxprEqn], reads: Sequence[Var], writes: Iterable[Var]
    ) -> Computation:
        outputs: Outputs = {}
        for output, terms in backward.outputs.items():
            if terms_of_half := tuple(term for term in terms if is_late(term) == (kind == "W")):
                outputs[output] = terms_of_half
        read = read_by(equations, (term for terms in outputs.values() for term in terms))
        return Computation(
            UnitName(kind, backward.name.chunk),
            equations=tuple(equations),
            reads=(*(v for v in backward.reads if v in read), *reads),
            arguments=tuple(v for v in backward.arguments if v in read),
            writes=tuple(writes),
            outputs=outputs,
        )

    writes = dict.fromkeys([*backward.writes, *handed_over])
    return half("I", first, (), writes), half("W", second, handed_over, ())


def _recomputable(computation: Computation) -> set[Var]:
    # What is cheaper to compute in both halves than to keep.
    costly = set(computation.reads)
    computed: set[Var] = set()
    for eqn in computation.equations:
        computed.update(eqn.outvars)
        if not is_cheap_or_collective(eqn) or not costly.isdisjoint(variables(eqn.invars)):
            costly.update(eqn.outvars)
    return computed - costly


def slice_program(
    program: ClosedJaxpr,
    *,
    split_backwards: bool = False,
    make_jaxpr: Callable[..., Callable[..., ClosedJaxpr]] = jax.make_jaxpr,
) -> SlicedProgram:
    """Cut a program at its stage marks.

    A program with G forward marks has G chunks: a mark follows each chunk, and the loss follows the
    last mark. In a gradient, chunk c becomes the computations Fc and Bc, or with `split_backwards`
    Fc, Ic and Wc; in a forward alone, Fc.

    Args:
      program: a forward, or `jax.value_and_grad` of one, traced by `make_jaxpr`.
      make_jaxpr: function that traces others as the program was, such as in `jax.shard_map`.

    Raises:
      ValueError: the marks do not cut the program; see `marks`.
    """
    flat = open_calls(program, checkpoints=split_backwards, make_jaxpr=make_jaxpr)
    segments = find_segments(flat)
    placement = place_equations(flat, segments)
    outputs = split_sums(segments, placement)
    computations = assemble_computations(flat, segments, placement, outputs)
    if split_backwards:
        halves: dict[UnitName, Computation] = {}
        for name, computation in computations.items():
            parts = split_backward(computation) if name.kind == "B" else (computation,)
            halves.update((part.name, part) for part in parts)
        computations = halves
    return SlicedProgram(flat, segments.num_chunks, computations)
