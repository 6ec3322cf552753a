"""Small hand-written programs, and the evaluation of a sliced one in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.slicing import slice_program

WIDTH = 4


def weights(count=3):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / 2, jnp.float32) for _ in range(count)]


def inputs():
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH)), jnp.float32)


def chain(w, x):
    """Three chunks of one matrix product each."""
    for one in w:
        x = mark(jnp.sin(x @ one))
    return jnp.sum(x * x)


def sliced(loss, *args, split_backwards=False):
    return slice_program(
        jax.make_jaxpr(jax.value_and_grad(loss))(*args), split_backwards=split_backwards
    )


def computation(program, text):
    """Return a computation by its name, such as `F1`."""
    return program.computations[UnitName(text[0], int(text[1:]))]


def operations(program, text):
    return [eqn.primitive.name for eqn in computation(program, text).equations]


def evaluate(program, *args):
    """Return the outputs of the program: run computations in order, add up terms of outputs."""
    env = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    outputs = [0.0] * program.num_outputs
    for c in program.computations.values():
        names = [*c.reads, *c.arguments]
        written, parts = program.function(c, names)(*(env[v] for v in names))
        env.update(zip(c.writes, written, strict=True))
        for i, terms in parts.items():
            outputs[i] = sum(terms, outputs[i])
    return outputs


def assert_computes(program, loss, *args):
    """Assert that a sliced program gives the loss and the gradient for the first argument."""
    expected = jax.tree.leaves(jax.value_and_grad(loss)(*args))
    for a, b in zip(evaluate(program, *args), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
