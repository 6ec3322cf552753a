"""Split a vjp over time: equal gradients, and no residual that is independent of the activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.pipeline.split_vjp import SplitVjp, dependence

X = (3, 4)  # shape of the activation; no weight has as many elements
L = 5


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


def split(f, weights, inputs=()):
    """Check f's `SplitVjp` against `jax.vjp`; return shapes and dtypes of its residuals, sorted."""
    x = array(*X, seed=1)
    split_vjp = SplitVjp(f, jax.ShapeDtypeStruct(x.shape, x.dtype), weights, inputs)
    y, vjp = jax.vjp(lambda x, weights: f(x, weights, inputs), x, weights)
    actual, residuals = jax.jit(split_vjp.forward)(x, weights, inputs)
    assert [(r.shape, r.dtype) for r in residuals] == [
        (r.shape, r.dtype) for r in split_vjp.residuals
    ]
    cotangent = jax.tree.map(lambda a: array(*a.shape, seed=2).astype(a.dtype), y)
    gradients = jax.jit(split_vjp.backward)(residuals, weights, inputs, cotangent)
    jax.tree.map(close, (actual, gradients), (y, vjp(cotangent)))
    return sorted((r.shape, r.dtype.name) for r in split_vjp.residuals)


TABLE = array(4, seed=3)  # captured


@pytest.mark.parametrize(
    ("f", "weights"),
    [
        (lambda x, w, _: x @ w, array(4, 7)),
        (lambda x, w, _: x @ w["a"] + x @ w["b"], {"a": array(4, 7), "b": array(4, 7, seed=3)}),
        (lambda x, w, _: x * w.astype(jnp.bfloat16).astype(jnp.float32), array(4)),
        (lambda x, w, _: x * TABLE * w, array(4)),
    ],
    ids=["product", "used_twice", "cast_of_weights", "captured_array"],
)
def test_residuals_are_the_activation_once_and_no_weight(f, weights):
    assert split(f, weights) == [(X, "float32")]


def test_residuals_that_are_random_numbers_are_recomputed():
    def f(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, X), x * w, 0)

    assert split(f, array(1), jax.random.key(0)) == [(X, "float32")]


def test_residuals_include_integers_and_masks_of_the_activation():
    def f(x, w, _):
        return jnp.where(x > 0, w[jnp.argmax(x, axis=1)], 0)

    dtypes = {dtype for _, dtype in split(f, array(4, 4))}
    assert "bool" in dtypes
    assert "int32" in dtypes


def test_split_vjp_of_a_tree_of_outputs_with_unused_weights_is_exact():
    def f(x, w, _):
        return {"y": jnp.sin(x), "sum": jnp.sum(x * x)}, w["used"] * 2

    split(f, {"used": array(2), "unused": array(6)})


def test_residuals_of_a_scan_over_layers_are_activations_only():
    """Weights enter as scanned inputs; their casts leave as scanned outputs, as activations do."""

    def f(x, w, _):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)), None

        return lax.scan(layer, x, w)[0]

    residuals = split(f, array(L, 4, 4))
    assert residuals
    assert {shape for shape, _ in residuals} == {(L, *X)}


def test_residuals_of_a_scan_that_carries_weights_are_activations_only():
    def f(x, w, _):
        def layer(carry, _):
            x, w = carry
            return (jnp.tanh(x @ w), w * 0.5), None

        return lax.scan(layer, (x, w), None, length=L)[0][0]

    assert {shape for shape, _ in split(f, array(4, 4))} == {(L, *X)}


def test_dependence_through_the_carries_of_two_turns_is_followed():
    """x reaches the third carry only after two turns: the body has to be read more than once."""

    def f(x, w, _):
        def layer(carry, w):
            a, b, c = carry
            return (a * 0.5, a + b, b), c * w

        start = (x, jnp.ones(X), jnp.ones(X))
        return lax.scan(layer, start, w)[1]

    assert ((L, *X), "float32") in split(f, array(L, 1, 1))


def test_dependence_of_a_scan_is_told_output_by_output():
    def f(x, w, v):
        def body(carry, v):
            a, b, c = carry
            return (x + a, a * 1, w * c), (b, c, v)

        (a, b, c), ys = lax.scan(body, (w, w, w), v)
        return a, b, c, *ys

    jaxpr = jax.make_jaxpr(f)(array(2), array(2), array(L, 2)).jaxpr
    assert dependence(jaxpr, [True, False, False]) == [True, True, False, True, False, False]
    assert dependence(jaxpr, [False, False, True]) == [False, False, False, False, False, True]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_residuals_of_a_call_are_those_of_its_body(wrap):
    def layer(x, w):
        return jnp.sin(x) @ jnp.exp(w), jnp.exp(w)

    def f(x, w, _):
        y, e = wrap(layer)(x, w)
        return y @ e.T

    shapes = {shape for shape, _ in split(f, array(4, 7))}
    assert (4, 7) not in shapes
    assert X in shapes


def test_residuals_of_a_checkpointed_function_are_its_input_only():
    """Full rematerialisation of a chunk is this case."""

    def chunk(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    f = lambda x, w, _: jax.checkpoint(chunk)(x, w)  # noqa: E731
    assert split(f, array(L, 4, 4)) == [(X, "float32")]


def test_residuals_of_a_custom_vjp_are_those_that_depend_on_the_activation():
    @jax.custom_vjp
    def product(x, w):
        return x * w

    def forward(x, w):
        return x * w, (jnp.sin(x), w + 1, x)

    def backward(residuals, g):
        sine, w, x = residuals
        return g * w * sine, jnp.sum(g * x, axis=0)

    product.defvjp(forward, backward)
    assert split(lambda x, w, _: product(x, w), array(4)) == [(X, "float32"), (X, "float32")]


@pytest.mark.parametrize("flag", [0, 1])
def test_residuals_of_a_conditional_include_the_activation(flag):
    """One branch makes a residual of the weight, the other of x."""

    def f(x, w, flag):
        w = lax.cond(flag > 0, lambda w: jnp.exp(w), lambda w: w * 2, w)
        return lax.cond(flag > 0, lambda x, w: jnp.sin(x) @ w, lambda x, w: x @ jnp.cos(w), x, w)

    shapes = [shape for shape, _ in split(f, array(4, 7), jnp.int32(flag))]
    assert X in shapes


def test_dependence_of_a_predicate_reaches_every_output():
    def f(x, w):
        return lax.cond(x[0] > 0, lambda w: w, lambda w: -w, w), w + 1

    jaxpr = jax.make_jaxpr(f)(array(2), array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True, False]


def test_dependence_of_a_conditional_is_told_output_by_output():
    def f(flag, x, w):
        return lax.cond(flag, lambda x, w: (w, w), lambda x, w: (w * 2, x), x, w)

    jaxpr = jax.make_jaxpr(f)(True, array(2), array(2)).jaxpr
    assert dependence(jaxpr, [False, True, False]) == [False, True]


def test_dependence_of_a_while_loop_is_on_all_of_its_inputs():
    """Also on those of its condition, which decides how often the body runs."""

    def doublings(limit, value):
        return lax.while_loop(lambda v: jnp.sum(v) < limit, lambda v: v * 2, value)

    def f(x, w, _):
        of_x = doublings(jnp.sum(jnp.abs(lax.stop_gradient(x))), jnp.ones((11,)))
        of_w = doublings(jnp.sum(jnp.abs(lax.stop_gradient(w))), jnp.ones((13,)))
        return w * jnp.sum(x) * jnp.sum(of_x * of_x) * jnp.sum(of_w * of_w)

    split(f, array(4, 7))
    jaxpr = jax.make_jaxpr(doublings)(1.0, array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True]
    assert dependence(jaxpr, [False, True]) == [True]
    assert dependence(jaxpr, [False, False]) == [False]


def test_dependence_of_a_reduction_is_on_all_of_its_operands():
    """Its second step reads what the first computed of the other operand."""

    def f(x, w):
        return lax.reduce((x, w), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[0]), (0,))

    jaxpr = jax.make_jaxpr(f)(array(2), array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True, True]
    assert dependence(jaxpr, [False, False]) == [False, False]
