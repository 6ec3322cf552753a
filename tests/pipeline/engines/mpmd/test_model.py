"""Weights are held back from an early cast, and their gradients are not."""

import jax
import jax.numpy as jnp

from maxpipe.config.catalog import RematPolicy
from maxpipe.pipeline.chunk import checkpoint
from maxpipe.pipeline.engines.mpmd.model import without_early_cast

WEIGHT, X = jnp.ones((4, 4), jnp.float32), jnp.ones((2, 4), jnp.bfloat16)


def product(weight, x):
    return x @ without_early_cast(weight, jnp.bfloat16).astype(jnp.bfloat16)


def test_weight_that_is_cast_has_a_barrier_before_and_its_gradient_has_none():
    assert "barrier" not in str(jax.make_jaxpr(product)(WEIGHT.astype(jnp.bfloat16), X))
    forward = str(jax.make_jaxpr(product)(WEIGHT, X))
    assert forward.index("optimization_barrier") < forward.index("convert_element_type")
    _, backward = jax.vjp(product, WEIGHT, X)
    assert "optimization_barrier" not in str(jax.make_jaxpr(backward)(X))


def test_backward_of_a_layer_that_saves_everything_applies_the_barrier_again():
    layer = checkpoint(product, RematPolicy(everything=True))
    residuals = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(layer, *args)[1]))(WEIGHT, X)
    weights = [v for v in residuals.jaxpr.outvars if v.aval.shape == WEIGHT.shape]
    assert weights
    assert all(v in residuals.jaxpr.invars for v in weights)
