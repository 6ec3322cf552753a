"""Splitting a vjp over time: equal gradients, and nothing kept that does not depend on the activation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.pipeline.engines.scheduled.split_vjp import SplitVjp, dependence

X = (3, 4)  # shape of the activation; no weight has as many elements
L = 5


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


def split(f, weights, rest=()):
    """Checks forward and backward of f's `SplitVjp` against `jax.vjp`; returns what it keeps, sorted."""
    x = array(*X, seed=1)
    halves = SplitVjp(f, jax.ShapeDtypeStruct(x.shape, x.dtype), weights, rest)
    y, vjp = jax.vjp(lambda x, weights: f(x, weights, rest), x, weights)
    actual, kept = jax.jit(halves.forward)(x, weights, rest)
    assert [(k.shape, k.dtype) for k in kept] == [(k.shape, k.dtype) for k in halves.kept]
    cotangent = jax.tree.map(lambda a: array(*a.shape, seed=2).astype(a.dtype), y)
    gradients = jax.jit(halves.backward)(kept, weights, rest, cotangent)
    jax.tree.map(close, (actual, gradients), (y, vjp(cotangent)))
    return sorted((k.shape, k.dtype.name) for k in halves.kept)


def test_a_product_keeps_the_activation_and_not_the_weight():
    assert split(lambda x, w, _: x @ w, array(4, 7)) == [(X, "float32")]


def test_a_residual_used_twice_is_kept_once():
    f = lambda x, w, _: x @ w["a"] + x @ w["b"]  # noqa: E731
    assert split(f, {"a": array(4, 7), "b": array(4, 7, seed=3)}) == [(X, "float32")]


def test_casts_of_weights_are_made_again():
    f = lambda x, w, _: x * w.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    assert split(f, array(4)) == [(X, "float32")]


def test_random_numbers_are_drawn_again():
    def f(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, X), x * w, 0)

    assert split(f, array(1), jax.random.key(0)) == [(X, "float32")]


def test_integers_and_masks_that_depend_on_the_activation_are_kept():
    def f(x, w, _):
        return jnp.where(x > 0, w[jnp.argmax(x, axis=1)], 0)

    kept = {dtype for _, dtype in split(f, array(4, 4))}
    assert "bool" in kept
    assert "int32" in kept


def test_outputs_may_be_a_tree_and_weights_unused():
    def f(x, w, _):
        return {"y": jnp.sin(x), "sum": jnp.sum(x * x)}, w["used"] * 2

    split(f, {"used": array(2), "unused": array(6)})


def test_a_scan_over_layers_keeps_inputs_and_no_weight():
    """Weights enter as scanned inputs; their casts leave as scanned outputs, beside the activations."""

    def f(x, w, _):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)), None

        return lax.scan(layer, x, w)[0]

    kept = split(f, array(L, 4, 4))
    assert kept
    assert {shape for shape, _ in kept} == {(L, *X)}


def test_a_carry_that_only_passes_weights_on_is_not_kept():
    def f(x, w, _):
        def layer(carry, _):
            x, w = carry
            return (jnp.tanh(x @ w), w * 0.5), None

        return lax.scan(layer, (x, w), None, length=L)[0][0]

    assert {shape for shape, _ in split(f, array(4, 4))} == {(L, *X)}


def test_dependence_travels_through_a_carry_from_one_turn_to_the_next():
    """x reaches the third place only after two turns, so that one look at the body does not find out."""

    def f(x, w, _):
        def layer(carry, w):
            a, b, c = carry
            return (a * 0.5, a + b, b), c * w

        start = (x, jnp.ones(X), jnp.ones(X))
        return lax.scan(layer, start, w)[1]

    assert ((L, *X), "float32") in split(f, array(L, 1, 1))


def test_dependence_of_a_scan():
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
def test_calls_are_looked_into(wrap):
    def layer(x, w):
        return jnp.sin(x) @ jnp.exp(w), jnp.exp(w)

    def f(x, w, _):
        y, e = wrap(layer)(x, w)
        return y @ e.T

    shapes = {shape for shape, _ in split(f, array(4, 7))}
    assert (4, 7) not in shapes
    assert X in shapes


def test_a_checkpointed_function_keeps_its_input_alone():
    """As full rematerialisation of a chunk does."""

    def chunk(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    f = lambda x, w, _: jax.checkpoint(chunk)(x, w)  # noqa: E731
    assert split(f, array(L, 4, 4)) == [(X, "float32")]


def test_residuals_of_a_custom_vjp():
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
def test_branches_of_a_conditional(flag):
    """The predicate is an input without a gradient; one branch makes a residual of the weight, the other of x."""

    def f(x, w, flag):
        w = lax.cond(flag > 0, lambda w: jnp.exp(w), lambda w: w * 2, w)
        return lax.cond(flag > 0, lambda x, w: jnp.sin(x) @ w, lambda x, w: x @ jnp.cos(w), x, w)

    shapes = [shape for shape, _ in split(f, array(4, 7), jnp.int32(flag))]
    assert X in shapes


def test_a_predicate_that_depends_on_the_activation_reaches_every_output():
    def f(x, w):
        return lax.cond(x[0] > 0, lambda w: w, lambda w: -w, w), w + 1

    jaxpr = jax.make_jaxpr(f)(array(2), array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True, False]


def test_branches_are_told_apart_output_by_output():
    def f(flag, x, w):
        return lax.cond(flag, lambda x, w: (w, w), lambda x, w: (w * 2, x), x, w)

    jaxpr = jax.make_jaxpr(f)(True, array(2), array(2)).jaxpr
    assert dependence(jaxpr, [False, True, False]) == [False, True]


def test_a_while_loop_depends_on_all_that_enters_it():
    """Also through its condition, which decides how often the body runs."""

    def doublings(limit, value):
        return lax.while_loop(lambda v: jnp.sum(v) < limit, lambda v: v * 2, value)

    def f(x, w, _):
        mine = doublings(jnp.sum(jnp.abs(lax.stop_gradient(x))), jnp.ones((11,)))
        others = doublings(jnp.sum(jnp.abs(lax.stop_gradient(w))), jnp.ones((13,)))
        return w * jnp.sum(x) * jnp.sum(mine * mine) * jnp.sum(others * others)

    split(f, array(4, 7))
    jaxpr = jax.make_jaxpr(doublings)(1.0, array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True]
    assert dependence(jaxpr, [False, True]) == [True]
    assert dependence(jaxpr, [False, False]) == [False]


def test_a_reduction_over_several_operands_depends_on_all_of_them():
    """Its second step sees what the first made of the other operand."""

    def f(x, w):
        return lax.reduce((x, w), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[0]), (0,))

    jaxpr = jax.make_jaxpr(f)(array(2), array(2)).jaxpr
    assert dependence(jaxpr, [True, False]) == [True, True]
    assert dependence(jaxpr, [False, False]) == [False, False]
