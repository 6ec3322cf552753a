"""Represent a sliced program: computations of stages that pass values to each other.

Values are variables of the traced program. A computation is named by a kind of unit
(`schedules.table.KINDS`) and a global chunk. `dump` shows a sliced program as text, for
`python -m maxpipe.compile CONFIG.yml pipeline.engine=mpmd --programs DIR`; XLA's own dumps
(XLA_FLAGS=--xla_dump_to=DIR) name modules after computations: `jit_F1` is the forward of chunk 1.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

from maxpipe.pipeline.jaxprs import Atom, part
from maxpipe.pipeline.schedules.table import KINDS, Table


class UnitName(NamedTuple):
    """Which computation: `F2` is the forward of global chunk 2.

    Besides units there are "gather" and "reduce", which a step runs once for each chunk, before its
    first unit and after its last.
    """

    kind: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}"

    def runs(self, num_microbatches: int) -> int:
        return num_microbatches if self.kind in KINDS else 1


@dataclass(frozen=True)
class Computation:
    """One unit of work as a program.

    Attributes:
      reads: values computed by other computations.
      arguments: inputs of the program, such as weights and the microbatch.
      writes: values that other computations read.
      outputs: by index of an output of the program, the terms that this adds to it.
    """

    name: UnitName
    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    arguments: tuple[Var, ...]
    writes: tuple[Var, ...]
    outputs: Mapping[int, tuple[Atom, ...]]


@dataclass(frozen=True, eq=False)
class SlicedProgram:
    """A program cut into computations, each of which runs once per microbatch.

    Attributes:
      flat: the traced program with its calls opened.
      computations: all computations by name, in an order that respects their dependencies.
    """

    flat: ClosedJaxpr
    num_chunks: int
    computations: Mapping[UnitName, Computation]

    @property
    def inputs(self) -> Sequence[Var]:
        return self.flat.jaxpr.invars

    @property
    def num_outputs(self) -> int:
        return len(self.flat.jaxpr.outvars)

    @cached_property
    def constants(self) -> Mapping[Var, ArrayLike]:
        return dict(zip(self.flat.jaxpr.constvars, self.flat.consts, strict=True))

    @cached_property
    def producer(self) -> Mapping[Var, UnitName]:
        return {v: c.name for c in self.computations.values() for v in c.writes}

    def function(
        self, computation: Computation, inputs: Sequence[Var]
    ) -> Callable[..., tuple[list[jax.Array], dict[int, list[jax.Array]]]]:
        """Return a computation as a function from arrays to (`writes`, list of terms by output).

        The function takes `inputs`, its `reads` and `arguments`, in this order.
        """
        # Constants are bound here, so that callers pass values and inputs only.
        constants = [v for v in self.constants if v in used(computation)]
        terms = {output: list(atoms) for output, atoms in computation.outputs.items()}
        # `eval_jaxpr` returns a flat list, which the tree takes apart again.
        results, tree = jax.tree.flatten((list(computation.writes), terms))
        jaxpr = part(self.flat.jaxpr, [*constants, *inputs], computation.equations, results)
        values = [self.constants[v] for v in constants]

        def run(*args: jax.Array) -> tuple[list[jax.Array], dict[int, list[jax.Array]]]:
            return jax.tree.unflatten(tree, jax.core.eval_jaxpr(jaxpr, (), *values, *args))

        return run


def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    assert isinstance(atom.aval, ShapedArray)
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def used(computation: Computation) -> set[Var]:
    # Literals are part of the equations themselves.
    atoms = [v for eqn in computation.equations for v in eqn.invars]
    atoms += [*computation.writes, *(v for terms in computation.outputs.values() for v in terms)]
    return {v for v in atoms if not isinstance(v, Literal)}


def fingerprint(program: SlicedProgram, table: Table) -> str:
    """Return a digest of a sliced program and its table, 16 hexadecimal digits.

    It says which operations run where, on arrays of which shapes, and what they pass to each
    other. Names that JAX gives and addresses in memory differ between processes, and are left out.
    """
    numbers: dict[Var, int] = {}

    def text(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"={atom.val}:{_shape(atom)}"
        return f"{numbers.setdefault(atom, len(numbers))}:{_shape(atom)}"

    def line(atoms: Iterable[Atom]) -> str:
        return " ".join(map(text, atoms))

    digest = hashlib.sha256(line(program.inputs).encode())
    for name, c in program.computations.items():
        # Numbers follow the order of the program, which is the same in all processes.
        lines = [f"{name} {line(c.reads)}; {line(c.arguments)}; {line(c.writes)}"]
        lines += [f"adds to {output} {line(terms)}" for output, terms in c.outputs.items()]
        for eqn in c.equations:
            lines.append(f"{eqn.primitive.name} {line(eqn.invars)} > {line(eqn.outvars)}")
        digest.update("\n".join(lines).encode())
    for kind in table.kinds:
        for column in table.units(kind):
            digest.update(column.tobytes())
    return digest.hexdigest()[:16]


# A constraint is shown by its PartitionSpec alone: its mesh is always the stage's.
_CONSTRAINT = re.compile(r"sharding_constraint\[[^\]]*?spec=(P\(.*\))\)\n[^\]]*\]")


def dump(
    program: SlicedProgram,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> dict[UnitName, str]:
    """Return for each computation, as text, what it reads, writes and adds to, and its equations.

    A value is named after the computation that writes it: `F1.0` is the first value that the
    forward of chunk 1 writes. Where devices have rows of their own, shapes are those of one
    device's parts.
    """
    inputs = input_names or [f"input {i}" for i in range(len(program.inputs))]
    outputs = output_names or [f"output {i}" for i in range(program.num_outputs)]
    names = dict(zip(program.inputs, inputs, strict=True))
    # All units first: the text of a unit names those that read its values later.
    readers: dict[Var, list[UnitName]] = {}
    for computation in program.computations.values():
        names |= {v: f"{computation.name}.{i}" for i, v in enumerate(computation.writes)}
        for v in computation.reads:
            readers.setdefault(v, []).append(computation.name)
    return {
        name: _text(program, computation, names, outputs, readers)
        for name, computation in program.computations.items()
    }


def _text(
    program: SlicedProgram,
    computation: Computation,
    names: Mapping[Var, str],
    output_names: Sequence[str],
    readers: Mapping[Var, Sequence[UnitName]],
) -> str:
    inputs = [*computation.reads, *computation.arguments]
    # Constants are among the operands; a trace of the computation would need its device mesh.
    constants = [v for v in program.constants if v in used(computation)]
    addends = [v for terms in computation.outputs.values() for v in terms]
    results = [*computation.writes, *addends]
    jaxpr = part(program.flat.jaxpr, [*constants, *inputs], computation.equations, results)
    lines = [str(computation.name)]
    for v in inputs:
        lines.append(f"  reads  {names[v]} {_shape(v)}")
    for v in computation.writes:
        lines.append(f"  writes {names[v]} {_shape(v)} for {', '.join(map(str, readers[v]))}")
    for output, terms in computation.outputs.items():
        lines.append(f"  adds to {output_names[output]} {_shape(terms[0])}")
    equations = _CONSTRAINT.sub(r"sharding_constraint[\1]", str(jaxpr))
    lines += [f"    {line}" for line in equations.splitlines()]
    return "\n".join(lines) + "\n"


def _shape(atom: Atom) -> str:
    return atom.aval.str_short(short_dtypes=True)


@dataclass
class Routes:
    """Transfers and lifetimes, the same for every microbatch.

    Attributes:
      sends: for each computation, the values that its stage sends to the stage of the next one when
        it is done.
      uses: for each stage, the computations that read or send each value there.
    """

    sends: dict[UnitName, list[Var]]
    uses: list[dict[Var, set[UnitName]]]

    def last_reads(self, stage: int, name: UnitName) -> set[Var]:
        """Return the values on a stage that no schedule uses after computation `name`."""
        return {
            v
            for v, names in self.uses[stage].items()
            if name in names and all(before(other, name) for other in names)
        }


def route(program: SlicedProgram, stage_of_chunk: Sequence[int]) -> Routes:
    """Find the way of every value from the stage that computes it to the stages that read it.

    Transfers run along the pipeline only. A value that a later stage reads passes through the
    stages in between, together with the activation, so that it is there when the schedule lets the
    later stage start.
    """
    num_stages = max(stage_of_chunk) + 1
    routes = Routes({name: [] for name in program.computations}, [{} for _ in range(num_stages)])
    backward_kind = "I" if any(name.kind == "I" for name in program.computations) else "B"
    arrived: set[tuple[Var, int]] = set()  # (value, stage)
    for name, computation in program.computations.items():
        stage = stage_of_chunk[name.chunk]
        arrived.update((v, stage) for v in computation.writes)
        for v in computation.reads:
            for sender, receiver in _hops(program.producer[v], name, backward_kind):
                # A hop is left out if an earlier reader has brought the value this far already.
                source, target = stage_of_chunk[sender.chunk], stage_of_chunk[receiver.chunk]
                if (v, stage) not in arrived and (v, target) not in arrived:
                    routes.sends[sender].append(v)
                    routes.uses[source].setdefault(v, set()).add(sender)
                    arrived.add((v, target))
            routes.uses[stage].setdefault(v, set()).add(name)
    return routes


def before(first: UnitName, second: UnitName) -> bool:
    """Return whether `first` is `second`, or runs before it in every schedule."""
    if first == second:
        return True
    # No other unit waits for a W.
    if first.kind == "W":
        return False
    # Forwards run from the first chunk to the last, and after them all backwards the other way.
    if first.kind == "F":
        return second.kind != "F" or first.chunk < second.chunk
    return second.kind != "F" and first.chunk >= second.chunk


def _hops(
    producer: UnitName, reader: UnitName, backward_kind: str
) -> list[tuple[UnitName, UnitName]]:
    turn = max(producer.chunk, reader.chunk)
    # With the activations, if the reader comes later in the forward; else with the gradients.
    if producer.kind == "F" and reader.chunk >= producer.chunk:
        return [(UnitName("F", c), UnitName("F", c + 1)) for c in range(producer.chunk, turn)]
    return [
        (UnitName(backward_kind, c), UnitName(backward_kind, c - 1))
        for c in range(turn, reader.chunk, -1)
    ]
