"""A sliced program as text; `python -m maxpipe.compile CONFIG.yml pipeline.engine=mpmd --programs DIR` writes it.

XLA's own dumps (XLA_FLAGS=--xla_dump_to=DIR) call modules after computations: `jit_F1` is the forward of chunk 1.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var

from maxpipe.pipeline.mpmd.program import Computation, Name, SlicedProgram, shape_of

# Of a layout only its spec; the mesh is that of the stage.
_CONSTRAINT = re.compile(r"sharding_constraint\[[^\]]*?spec=(P\(.*\))\)\n[^\]]*\]")


def dump(
    program: SlicedProgram, input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None
) -> dict[Name, str]:
    """For every computation what it reads, writes and adds to, and its equations.

    A value is called after the computation that writes it: `F1.0` is the first one of the forward of chunk 1.

    Args:
      program: sliced.
      input_names, output_names: of the program's inputs and outputs; by default `input 0` and so on.
    """
    outputs = output_names or [f"output {i}" for i in range(program.num_outputs)]
    names = dict(zip(program.inputs, input_names or [f"input {i}" for i in range(len(program.inputs))], strict=True))
    readers: dict[Var, list[Name]] = {}
    for computation in program.computations.values():
        names |= {v: f"{computation.name}.{i}" for i, v in enumerate(computation.writes)}
        for v in computation.reads:
            readers.setdefault(v, []).append(computation.name)
    return {name: _computation(program, c, names, outputs, readers) for name, c in program.computations.items()}


def _computation(
    program: SlicedProgram, computation: Computation, names: Mapping[Var, str], outputs: Sequence[str],
    readers: Mapping[Var, Sequence[Name]],
) -> str:  # fmt: skip
    inputs = [*computation.reads, *computation.arguments]
    jaxpr = jax.make_jaxpr(program.function(computation, inputs))(*map(shape_of, inputs))
    lines = [str(computation.name)]
    lines += [f"  reads  {names[v]} {_shape(v)}" for v in inputs]
    lines += [
        f"  writes {names[v]} {_shape(v)} for {', '.join(map(str, readers[v]))}" for v in computation.writes
    ]  # fmt: skip
    lines += [f"  adds to {outputs[i]} {_shape(atoms[0])}" for i, atoms in computation.outputs.items()]
    text = _CONSTRAINT.sub(r"sharding_constraint[\1]", str(jaxpr))
    return "\n".join([*lines, *(f"    {line}" for line in text.splitlines())]) + "\n"


def _shape(v: Any) -> str:
    return v.aval.str_short(short_dtypes=True)
