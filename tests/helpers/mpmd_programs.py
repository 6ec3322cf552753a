"""Small programs with stage marks, and the evaluation of a sliced program on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.program import Computation, SlicedProgram, UnitName
from maxpipe.pipeline.engines.mpmd.slicing import slice_program
from maxpipe.pipeline.jaxprs import shaped

WIDTH = 4


def weights(count: int = 3) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / 2, jnp.float32) for _ in range(count)]


def inputs() -> jax.Array:
    """Return random activations [2, WIDTH]."""
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH)), jnp.float32)


def chain(matrices: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for matrix in matrices:
        x = mark(jnp.sin(x @ matrix))
    return jnp.sum(x * x)


def sliced(
    loss: Callable[..., jax.Array], *args: Any, split_backwards: bool = False
) -> SlicedProgram:
    return slice_program(
        jax.make_jaxpr(jax.value_and_grad(loss))(*args), split_backwards=split_backwards
    )


def computation(program: SlicedProgram, text: str) -> Computation:
    return program.computations[UnitName(text[0], int(text[1:]))]


def operations(program: SlicedProgram, text: str) -> list[str]:
    return [eqn.primitive.name for eqn in computation(program, text).equations]


def assert_computes(program: SlicedProgram, loss: Callable[..., jax.Array], *args: Any) -> None:
    """Run computations in order, add up the parts of outputs, and compare with the plain loss."""
    values: dict[Var, Any] = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    outputs: list[Any] = [0.0] * program.num_outputs
    for c in program.computations.values():
        names = [*c.reads, *c.arguments]
        written, parts = program.function(c, names)(*(values[v] for v in names))
        values.update(zip(c.writes, written, strict=True))
        for i, addends in parts.items():
            outputs[i] = sum(addends, outputs[i])
    expected = jax.tree.leaves(jax.value_and_grad(loss)(*args))
    for a, b in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def two_layers_hand_over(trainer: Any) -> tuple[int, int]:
    """Return the bytes that two layers add to what F writes and what W reads.

    Chunk 2 of the trainer's stages has two layers more than chunk 1.
    """
    of = trainer.engine.training.program.computations

    def size(variables: Sequence[Var]) -> int:
        return sum(shaped(v).size * shaped(v).dtype.itemsize for v in variables)

    forward = size(of[UnitName("F", 2)].writes) - size(of[UnitName("F", 1)].writes)
    late = size(of[UnitName("W", 2)].reads) - size(of[UnitName("W", 1)].reads)
    return forward, late
