"""A sliced program as text.

What XLA makes of it is in its own dumps (XLA_FLAGS=--xla_dump_to=DIR), whose modules are called after computations:
`jit_F1` is the forward of chunk 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var

from maxpipe.pipeline.mpmd.program import Computation, Name, SlicedProgram, shape_of


def dump(program: SlicedProgram, input_names: Sequence[str] | None = None) -> str:
    """Every computation with what it reads, writes and adds to, and its equations.

    A value is called after the computation that writes it: `F1.0` is the first one of the forward of chunk 1.

    Args:
      program: sliced.
      input_names: of the program's inputs; by default `input 0` and so on.
    """
    names = dict(zip(program.inputs, input_names or [f"input {i}" for i in range(len(program.inputs))], strict=True))
    readers: dict[Var, list[Name]] = {}
    for computation in program.computations.values():
        names |= {v: f"{computation.name}.{i}" for i, v in enumerate(computation.writes)}
        for v in computation.reads:
            readers.setdefault(v, []).append(computation.name)
    return "\n".join(_computation(program, c, names, readers) for c in program.computations.values())


def _computation(
    program: SlicedProgram, computation: Computation, names: Mapping[Var, str], readers: Mapping[Var, Sequence[Name]]
) -> str:
    inputs = [*computation.reads, *computation.arguments]
    jaxpr = jax.make_jaxpr(program.function(computation, inputs))(*map(shape_of, inputs))
    lines = [str(computation.name)]
    lines += [f"  reads  {names[v]} {_shape(v)}" for v in inputs]
    lines += [
        f"  writes {names[v]} {_shape(v)} for {', '.join(map(str, readers[v]))}" for v in computation.writes
    ]  # fmt: skip
    lines += [f"  adds to output {i} {_shape(atoms[0])}" for i, atoms in computation.outputs.items()]
    return "\n".join([*lines, *(f"    {line}" for line in str(jaxpr).splitlines())]) + "\n"


def _shape(v: Any) -> str:
    return v.aval.str_short(short_dtypes=True)
