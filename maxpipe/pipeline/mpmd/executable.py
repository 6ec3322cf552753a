"""A computation compiled for its stage: gradients are added in place, and what dies here gives its memory back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding

from maxpipe.pipeline.mpmd.program import Computation, SlicedProgram, shape_of


class Executable:
    """One computation, compiled at its first call and used for all microbatches.

    Called as f(sums, donated, kept, fixed, varying): the running sums of `outputs`, then the values of `donated` and
    `kept`, then the arguments of `fixed` and `varying`, each a list; returns (new sums, values of `writes`). The
    arrays of the first two lists are given away.

    Args:
      program: that the computation belongs to.
      computation: to compile.
      dying: values that nothing reads after this computation.
      varying: inputs of the program that differ between microbatches.
      sum_shardings: where the running sum of each output lies.

    Attributes:
      outputs: indices of the program's outputs that get a part from here.
      donated, kept: the values read; memory of the former is used for what is written.
      fixed, varying: the arguments.
      writes: the values written.
    """

    def __init__(
        self,
        program: SlicedProgram,
        computation: Computation,
        dying: Collection[Var],
        varying: Collection[Var],
        sum_shardings: Mapping[int, NamedSharding],
    ):
        self.outputs = list(computation.outputs)
        self.donated = _donations(computation, dying)
        self.kept = [v for v in computation.reads if v not in self.donated]
        self.fixed = [v for v in computation.arguments if v not in varying]
        self.varying = [v for v in computation.arguments if v in varying]
        self.writes = computation.writes
        inputs = [*self.donated, *self.kept, *self.fixed, *self.varying]
        f = program.function(computation, inputs)

        def run(sums: list, donated: list, kept: list, fixed: list, varying: list) -> tuple[list, list]:
            written, parts = f(*donated, *kept, *fixed, *varying)
            return [_add(s, parts[i]) for s, i in zip(sums, self.outputs, strict=True)], written

        run.__name__ = str(computation.name)  # in profiles and dumps of XLA
        shardings = [sum_shardings[i] for i in self.outputs], None
        self.run: jax.stages.Wrapped = jax.jit(run, donate_argnums=(0, 1), out_shardings=shardings)


def _add(total: jax.Array, parts: Sequence[Any]) -> jax.Array:
    for part in parts:
        total = total + jnp.asarray(part).astype(total.dtype)
    return total


def _donations(computation: Computation, dying: Collection[Var]) -> list[Var]:
    """Dying values as large as something written: XLA takes memory over from like to like."""
    room = [shape_of(v) for v in computation.writes]
    found = []
    for v in computation.reads:
        if v in dying and shape_of(v) in room:
            room.remove(shape_of(v))
            found.append(v)
    return found
