"""Weights are held back from an early cast, and their gradients are not."""

import jax
import jax.numpy as jnp

from maxpipe.pipeline.engines.mpmd.model import without_early_cast

WEIGHT, X = jnp.ones((4, 4), jnp.float32), jnp.ones((2, 4), jnp.bfloat16)


def product(weight, x):
    return x @ without_early_cast(weight, jnp.bfloat16).astype(jnp.bfloat16)


def test_weight_has_a_barrier_before_its_cast_and_its_gradient_has_none():
    forward = str(jax.make_jaxpr(product)(WEIGHT, X))
    assert forward.index("optimization_barrier") < forward.index("convert_element_type")
    _, backward = jax.vjp(product, WEIGHT, X)
    assert "optimization_barrier" not in str(jax.make_jaxpr(backward)(X))


def test_weight_that_needs_no_cast_has_no_barrier():
    assert "optimization_barrier" not in str(
        jax.make_jaxpr(product)(WEIGHT.astype(jnp.bfloat16), X)
    )
