"""A backward in two halves: equal gradients, no product twice, nothing stashed that is cheap."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.pipeline.split_vjp import SplitBackwardVjp

X = (3, 4)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def products(f, *args):
    return Counter(eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns)["dot_general"]


def halves(f, weights, inputs=()):
    """Check both halves against `jax.vjp`.

    Returns:
      (shapes and dtypes stashed, sorted; number of products in I; in W).
    """
    x = array(*X, seed=1)
    split = SplitBackwardVjp(f, jax.ShapeDtypeStruct(x.shape, x.dtype), weights, inputs)
    y, vjp = jax.vjp(lambda x, weights: f(x, weights, inputs), x, weights)
    cotangent = jax.tree.map(lambda a: array(*a.shape, seed=2).astype(a.dtype), y)
    _, residuals = split.forward(x, weights, inputs)
    dx, stash = split.input_gradient(residuals, weights, inputs, cotangent)
    assert [(a.shape, a.dtype) for a in stash] == [(a.shape, a.dtype) for a in split.stash]
    dw = split.weight_gradients(residuals, weights, inputs, stash)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (dx, dw),
        vjp(cotangent),
    )
    first = products(split.input_gradient, residuals, weights, inputs, cotangent)
    second = products(split.weight_gradients, residuals, weights, inputs, stash)
    return sorted((a.shape, a.dtype.name) for a in stash), first, second


def test_stash_of_a_product_is_its_cotangent():
    assert halves(lambda x, w, _: x @ w, array(4, 7)) == ([((3, 7), "float32")], 1, 1)


def test_stash_of_a_gate_is_the_one_cotangent_of_its_output():
    """W recomputes the cotangents of both sides, and the activation function, from residuals."""

    def gated(x, w, _):
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    weights = {"gate": array(4, 7), "up": array(4, 7, seed=3), "down": array(7, 5, seed=4)}
    assert halves(gated, weights) == ([((3, 5), "float32"), ((3, 7), "float32")], 3, 3)


def test_stash_of_a_cast_and_reshaped_cotangent_is_its_source():
    def f(x, w, _):
        y = x.astype(jnp.bfloat16).reshape(-1) * w["scale"].astype(jnp.bfloat16)
        return (y.reshape(X) @ w["product"].astype(jnp.bfloat16)).astype(jnp.bfloat16)

    # bfloat16 sums in different orders.
    x, weights = array(*X), {"scale": array(12), "product": array(4, 7)}
    split = SplitBackwardVjp(f, x, weights, ())
    assert sorted((a.shape, a.dtype.name) for a in split.stash) == [
        ((3, 4), "bfloat16"),
        ((3, 7), "bfloat16"),
    ]


def test_stash_of_two_cotangents_with_a_sum_is_the_sum():
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
def test_stash_of_a_rematerialised_forward_includes_its_products(wrap):
    def f(x, w, _):
        return wrap(lambda x, w: jnp.sin(x @ w["a"]) @ w["b"])(x, w)

    stash, first, second = halves(f, {"a": array(4, 7), "b": array(7, 5, seed=3)})
    # The result of x @ a, the source of its cotangent, and the cotangent of the output.
    assert stash == [((3, 5), "float32"), ((3, 7), "float32"), ((3, 7), "float32")]
    assert (first, second) == (1 + 2, 2)


def test_stash_of_a_product_of_weights_is_empty_of_it():
    def f(x, w, _):
        return x * (w["a"] @ w["b"])

    assert halves(f, {"a": array(3, 6), "b": array(6, 4, seed=3)}) == ([((3, 4), "float32")], 1, 2)


def test_stash_of_random_numbers_is_empty_of_them():
    def f(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, (3, 7)), x @ w, 0)

    assert halves(f, array(4, 7), jax.random.key(0))[0] == [((3, 7), "float32")]


def test_stash_of_a_loop_is_its_weight_gradient():
    def f(x, w, _):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert halves(f, array(5, 4, 4))[0] == [((5, 4, 4), "float32")]


def test_stash_of_a_tree_of_outputs_with_unused_weights_is_the_product_cotangent():
    f = lambda x, w, _: {"y": jnp.sin(x) * w["used"], "sum": jnp.sum(x * x)}  # noqa: E731
    assert halves(f, {"used": array(4), "unused": array(6)})[0] == [((3, 4), "float32")]
