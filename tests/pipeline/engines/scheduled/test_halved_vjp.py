"""Halves of a backward: equal gradients, no product twice, and nothing stashed that can be made again for little."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.pipeline.engines.scheduled.split_vjp import HalvedVjp

X = (3, 4)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def products(f, *args):
    return Counter(eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns)["dot_general"]


def halves(f, weights, rest=()):
    """Checks both halves against `jax.vjp`; returns (shapes stashed, sorted; products in the first and second half)."""
    x = array(*X, seed=1)
    split = HalvedVjp(f, jax.ShapeDtypeStruct(x.shape, x.dtype), weights, rest)
    y, vjp = jax.vjp(lambda x, weights: f(x, weights, rest), x, weights)
    cotangent = jax.tree.map(lambda a: array(*a.shape, seed=2).astype(a.dtype), y)
    _, kept = split.forward(x, weights, rest)
    dx, stash = split.input_gradient(kept, weights, rest, cotangent)
    assert [(a.shape, a.dtype) for a in stash] == [(a.shape, a.dtype) for a in split.stash]
    dw = split.weight_gradients(kept, weights, rest, stash)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (dx, dw),
        vjp(cotangent),
    )
    first = products(split.input_gradient, kept, weights, rest, cotangent)
    second = products(split.weight_gradients, kept, weights, rest, stash)
    return sorted((a.shape, a.dtype.name) for a in stash), first, second


def test_a_product_leaves_its_cotangent():
    assert halves(lambda x, w, _: x @ w, array(4, 7)) == ([((3, 7), "float32")], 1, 1)


def test_a_gate_leaves_the_one_cotangent_that_those_of_its_sides_are_made_of():
    """And the activation function between the products is made again from what the forward kept."""

    def gated(x, w, _):
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    weights = {"gate": array(4, 7), "up": array(4, 7, seed=3), "down": array(7, 5, seed=4)}
    assert halves(gated, weights) == ([((3, 5), "float32"), ((3, 7), "float32")], 3, 3)


def test_a_cast_and_a_reshaped_cotangent_are_stashed_as_they_came():
    def f(x, w, _):
        y = x.astype(jnp.bfloat16).reshape(-1) * w["scale"].astype(jnp.bfloat16)
        return (y.reshape(X) @ w["product"].astype(jnp.bfloat16)).astype(jnp.bfloat16)

    # bfloat16 sums in different orders.
    x, weights = array(*X), {"scale": array(12), "product": array(4, 7)}
    split = HalvedVjp(f, x, weights, ())
    assert sorted((a.shape, a.dtype.name) for a in split.stash) == [
        ((3, 4), "bfloat16"),
        ((3, 7), "bfloat16"),
    ]


def test_a_sum_of_two_cotangents_is_stashed_instead_of_both():
    def f(x, w, _):
        y = x * w["scale"]
        return y @ w["a"], y @ w["b"]

    weights = {"scale": array(4), "a": array(4, 6), "b": array(4, 5, seed=3)}
    assert halves(f, weights) == (
        [((3, 4), "float32"), ((3, 5), "float32"), ((3, 6), "float32")],
        2,
        2,
    )


@pytest.mark.parametrize(
    "wrap", [jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.checkpoint(f)))]
)
def test_products_of_a_rematerialised_forward_are_computed_again_once_and_stashed(wrap):
    def f(x, w, _):
        return wrap(lambda x, w: jnp.sin(x @ w["a"]) @ w["b"])(x, w)

    stash, first, second = halves(f, {"a": array(4, 7), "b": array(7, 5, seed=3)})
    # The result of x @ a, its cotangent's source, and the cotangent of the output.
    assert stash == [((3, 5), "float32"), ((3, 7), "float32"), ((3, 7), "float32")]
    assert (first, second) == (1 + 2, 2)


def test_what_is_made_of_weights_alone_is_made_again_whatever_the_work():
    def f(x, w, _):
        return x * (w["a"] @ w["b"])

    assert halves(f, {"a": array(3, 6), "b": array(6, 4, seed=3)}) == ([((3, 4), "float32")], 1, 2)


def test_random_numbers_are_drawn_again():
    def f(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, (3, 7)), x @ w, 0)

    assert halves(f, array(4, 7), jax.random.key(0))[0] == [((3, 7), "float32")]


def test_gradients_out_of_a_loop_are_stashed_whole():
    def f(x, w, _):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert halves(f, array(5, 4, 4))[0] == [((5, 4, 4), "float32")]


def test_weights_without_use_and_outputs_in_a_tree():
    f = lambda x, w, _: {"y": jnp.sin(x) * w["used"], "sum": jnp.sum(x * x)}  # noqa: E731
    assert halves(f, {"used": array(4), "unused": array(6)})[0] == [((3, 4), "float32")]
