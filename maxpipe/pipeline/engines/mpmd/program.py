"""A sliced program: computations of stages that meet in values.

Values are the variables of the traced program. A computation is named by a kind of
`schedules._table` and a global chunk.

A sliced program as text; `python -m maxpipe.compile CONFIG.yml pipeline.engine=mpmd --programs DIR`
writes it.

XLA's own dumps (XLA_FLAGS=--xla_dump_to=DIR) call modules after computations: `jit_F1` is the
forward of chunk 1."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from maxpipe.pipeline.jaxprs import Atom, part


class UnitName(NamedTuple):
    """Which computation: `F2` is the forward of global chunk 2."""

    kind: str
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}"


@dataclass(frozen=True)
class Computation:
    """One unit of work as a program.

    Attributes:
      name: kind and chunk.
      equations: in order.
      reads: values computed by other computations.
      arguments: inputs of the whole program, such as weights and the microbatch.
      writes: values that other computations read.
      outputs: for each output of the whole program that gets a part from here, the part's atoms by
        the output's index.
    """

    name: UnitName
    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    arguments: tuple[Var, ...]
    writes: tuple[Var, ...]
    outputs: Mapping[int, tuple[Atom, ...]]


@dataclass(frozen=True, eq=False)
class SlicedProgram:
    """A program cut into computations, each of which runs once for a microbatch.

    Attributes:
      flat: the traced program, calls opened.
      num_chunks: G.
      computations: by name, in an order that respects their dependencies.
    """

    flat: Any
    num_chunks: int
    computations: Mapping[UnitName, Computation]

    @property
    def inputs(self) -> Sequence[Var]:
        """Inputs of the whole program, in its order."""
        return self.flat.jaxpr.invars

    @property
    def num_outputs(self) -> int:
        return len(self.flat.jaxpr.outvars)

    @cached_property
    def constants(self) -> Mapping[Var, Any]:
        """Values of the captured constants."""
        return dict(zip(self.flat.jaxpr.constvars, self.flat.consts, strict=True))

    @cached_property
    def producer(self) -> Mapping[Var, UnitName]:
        """Which computation writes a value."""
        return {v: c.name for c in self.computations.values() for v in c.writes}

    def function(self, computation: Computation, inputs: Sequence[Var]) -> Callable[..., Any]:
        """The computation as a function.

        Args:
          computation: one of this program's.
          inputs: its `reads` and `arguments` in the order in which the function takes them.

        Returns:
          A function of arrays to (`writes`, parts of `outputs` by output, those of one output in a
          list).
        """
        constants = [v for v in self.constants if v in used(computation)]
        parts = {i: list(atoms) for i, atoms in computation.outputs.items()}
        results, tree = jax.tree.flatten((list(computation.writes), parts))
        jaxpr = part(self.flat.jaxpr, [*constants, *inputs], computation.equations, results)
        values = [self.constants[v] for v in constants]

        def run(*args: jax.Array) -> Any:
            return jax.tree.unflatten(tree, jax.core.eval_jaxpr(jaxpr, (), *values, *args))

        return run


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def used(computation: Computation) -> set[Var]:
    """All variables that a computation's equations and outputs name."""
    atoms = [v for eqn in computation.equations for v in eqn.invars]
    atoms += [*computation.writes, *(v for part in computation.outputs.values() for v in part)]
    return {v for v in atoms if not isinstance(v, Literal)}


# Of a layout only its spec; the mesh is that of the stage.
_CONSTRAINT = re.compile(r"sharding_constraint\[[^\]]*?spec=(P\(.*\))\)\n[^\]]*\]")


def dump(
    program: SlicedProgram,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> dict[UnitName, str]:
    """For every computation what it reads, writes and adds to, and its equations.

    A value is called after the computation that writes it: `F1.0` is the first one of the forward
    of chunk 1.

    Args:
      program: sliced.
      input_names, output_names: of the program's inputs and outputs; by default `input 0` and so
        on.
    """
    outputs = output_names or [f"output {i}" for i in range(program.num_outputs)]
    names = dict(
        zip(
            program.inputs,
            input_names or [f"input {i}" for i in range(len(program.inputs))],
            strict=True,
        )
    )
    readers: dict[Var, list[UnitName]] = {}
    for computation in program.computations.values():
        names |= {v: f"{computation.name}.{i}" for i, v in enumerate(computation.writes)}
        for v in computation.reads:
            readers.setdefault(v, []).append(computation.name)
    return {
        name: _computation(program, c, names, outputs, readers)
        for name, c in program.computations.items()
    }


def _computation(
    program: SlicedProgram,
    computation: Computation,
    names: Mapping[Var, str],
    outputs: Sequence[str],
    readers: Mapping[Var, Sequence[UnitName]],
) -> str:
    inputs = [*computation.reads, *computation.arguments]
    jaxpr = jax.make_jaxpr(program.function(computation, inputs))(*map(shape_of, inputs))
    lines = [str(computation.name)]
    lines += [f"  reads  {names[v]} {_shape(v)}" for v in inputs]
    lines += [
        f"  writes {names[v]} {_shape(v)} for {', '.join(map(str, readers[v]))}"
        for v in computation.writes
    ]
    lines += [
        f"  adds to {outputs[i]} {_shape(atoms[0])}" for i, atoms in computation.outputs.items()
    ]
    text = _CONSTRAINT.sub(r"sharding_constraint[\1]", str(jaxpr))
    return "\n".join([*lines, *(f"    {line}" for line in text.splitlines())]) + "\n"


def _shape(v: Any) -> str:
    return v.aval.str_short(short_dtypes=True)
