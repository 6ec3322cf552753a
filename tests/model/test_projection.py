"""Products of activations with weights against einsum, and what their gradients ask of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.model.layers import project


def operands(contracted, dtype=jnp.float32):
    x_key, w_key = jax.random.split(jax.random.key(0))
    x_shape, w_shape = {1: ((2, 3, 4), (4, 5, 6)), 2: ((2, 3, 4, 5), (4, 5, 6))}[contracted]
    return jax.random.normal(x_key, x_shape, dtype), jax.random.normal(w_key, w_shape, dtype)


@pytest.mark.parametrize(("contracted", "letters"), [(1, "bti,iho->btho"), (2, "btih,iho->bto")])
def test_project_and_its_gradients_equal_einsums(contracted, letters):
    def loss(product):
        return lambda x, w: jnp.sum(jnp.sin(product(x, w)))

    arrays = operands(contracted)
    expected = jax.value_and_grad(loss(lambda x, w: jnp.einsum(letters, x, w)), (0, 1))(*arrays)
    actual = jax.value_and_grad(loss(lambda x, w: project(x, w, contracted)), (0, 1))(*arrays)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )


def test_project_returns_the_requested_dtype_and_gradients_of_operand_dtype():
    x, w = operands(1, jnp.bfloat16)
    assert project(x, w).dtype == jnp.bfloat16
    product, gradients = jax.vjp(lambda x, w: project(x, w, 1, jnp.float32), x, w)
    np.testing.assert_allclose(
        product, jnp.einsum("bti,iho->btho", x.astype(jnp.float32), w), rtol=1e-5, atol=1e-5
    )
    assert [g.dtype for g in gradients(product)] == [jnp.bfloat16, jnp.bfloat16]


def test_project_gradients_are_summed_in_the_requested_dtype_without_a_transpose():
    """In bfloat16 over devices too, where the partitioner makes a sum of each part's."""

    def gradients(x, w, cotangent):
        return jax.vjp(lambda x, w: project(x, w, 1, jnp.float32), x, w)[1](cotangent)

    x, w = operands(1, jnp.bfloat16)
    program = jax.make_jaxpr(gradients)(x, w, project(x, w, 1, jnp.float32))
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in products[-2:]] == [jnp.float32, jnp.float32]
    assert "transpose[" not in str(program)
