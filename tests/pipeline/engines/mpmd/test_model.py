"""Weights are held back from an early cast, and their gradients are not."""

import jax
import jax.numpy as jnp

from maxpipe.pipeline.engines.mpmd.model import without_early_cast


def test_weight_has_a_barrier_before_its_cast_and_its_gradient_has_none():
    def product(weight, x):
        return x @ without_early_cast(weight).astype(jnp.bfloat16)

    weight, x = jnp.ones((4, 4), jnp.float32), jnp.ones((2, 4), jnp.bfloat16)
    forward = str(jax.make_jaxpr(product)(weight, x))
    assert forward.index("optimization_barrier") < forward.index("convert_element_type")
    _, backward = jax.vjp(product, weight, x)
    assert "optimization_barrier" not in str(jax.make_jaxpr(backward)(x))
