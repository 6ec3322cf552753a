"""Split a vjp over time: equal gradients, few residuals, and nothing computed twice."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from maxpipe.pipeline.split_vjp import SplitBackwardVjp, SplitVjp, dependence

X = (3, 4)  # shape of the activation; no weight has as many elements
L = 5


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def kinds(arrays):
    return sorted((a.shape, a.dtype.name) for a in arrays)


def assert_close(actual, desired):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, desired
    )


def split(make, f, weights, inputs):
    """Check a forward against `jax.vjp`; return (split vjp, residuals, cotangent, gradients)."""
    x = array(*X, seed=1)
    split_vjp = make(f, jax.ShapeDtypeStruct(x.shape, x.dtype), weights, inputs)
    y, vjp = jax.vjp(lambda x, weights: f(x, weights, inputs), x, weights)
    actual, residuals = jax.jit(split_vjp.forward)(x, weights, inputs)
    assert_close(actual, y)
    assert kinds(residuals) == kinds(split_vjp.residuals)
    cotangent = jax.tree.map(lambda a: array(*a.shape, seed=2).astype(a.dtype), y)
    return split_vjp, residuals, cotangent, vjp(cotangent)


def residuals_of(f, weights, inputs=()):
    whole, residuals, cotangent, expected = split(SplitVjp, f, weights, inputs)
    assert_close(jax.jit(whole.backward)(residuals, weights, inputs, cotangent), expected)
    return kinds(residuals)


def shapes_of(f, weights, inputs=()):
    return {shape for shape, _ in residuals_of(f, weights, inputs)}


def over_layers(layer):
    return lambda x, w, _: lax.scan(layer, x, w)[0]


def carrying_weights(x, w, _):
    def layer(carry, _):
        x, w = carry
        return (jnp.tanh(x @ w), w * 0.5), None

    return lax.scan(layer, (x, w), None, length=L)[0][0]


@jax.custom_vjp
def product(x, w):
    return x * w


product.defvjp(
    lambda x, w: (x * w, (jnp.sin(x), w + 1, x)),
    lambda saved, g: (g * saved[1] * saved[0], jnp.sum(g * saved[2], axis=0)),
)
TABLE = array(4, seed=3)  # captured


def to_bfloat16_and_back(w):
    return w.astype(jnp.bfloat16).astype(jnp.float32)


def dropped(x, w, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, X), x * w, 0)


def checkpointed(x, w, _):
    return jax.checkpoint(lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])(
        x, w
    )


KEY = jax.random.key(0)
RESIDUALS = {
    "product": (lambda x, w, _: x @ w, array(4, 7), (), [X]),
    "used_twice": (lambda x, w, _: x @ w[0] + x @ w[1], array(2, 4, 7), (), [X]),
    # Casts of weights, captured arrays and random numbers are computed again.
    "cast": (lambda x, w, _: x * to_bfloat16_and_back(w), array(4), (), [X]),
    "captured": (lambda x, w, _: x * TABLE * w, array(4), (), [X]),
    "random": (dropped, array(1), KEY, [X]),
    "checkpoint": (checkpointed, array(L, 4, 4), (), [X]),  # full rematerialisation of a chunk
    "custom_vjp": (lambda x, w, _: product(x, w), array(4), (), [X, X]),
}


@pytest.mark.parametrize(("f", "weights", "inputs", "shapes"), RESIDUALS.values(), ids=RESIDUALS)
def test_residuals_are_those_of_the_activation_each_once(f, weights, inputs, shapes):
    assert residuals_of(f, weights, inputs) == [(shape, "float32") for shape in shapes]


@pytest.mark.parametrize(
    ("f", "weights"),
    [
        # Weights enter as scanned inputs; their casts leave as scanned outputs, as activations do.
        (over_layers(lambda x, w: (jnp.tanh(x @ to_bfloat16_and_back(w)), None)), array(L, 4, 4)),
        (carrying_weights, array(4, 4)),
    ],
    ids=["scanned", "carried"],
)
def test_residuals_of_a_scan_are_activations_only(f, weights):
    assert shapes_of(f, weights) == {(L, *X)}


def test_residuals_include_integers_and_masks_of_the_activation():
    def f(x, w, _):
        return jnp.where(x > 0, w[jnp.argmax(x, axis=1)], 0)

    assert {"bool", "int32"} <= {dtype for _, dtype in residuals_of(f, array(4, 4))}


@pytest.mark.parametrize("flag", [0, 1])
def test_residuals_of_a_conditional_include_the_activation(flag):
    """One branch makes a residual of the weight, the other of x."""

    def f(x, w, flag):
        return lax.cond(flag > 0, lambda x, w: jnp.sin(x) @ w, lambda x, w: x @ jnp.cos(w), x, w)

    assert X in shapes_of(f, array(4, 7), jnp.int32(flag))


def doublings(limit, value):
    return lax.while_loop(lambda v: jnp.sum(v) < limit, lambda v: v * 2, value)


def of_two_loops(x, w, _):
    of_x = doublings(jnp.sum(jnp.abs(lax.stop_gradient(x))), jnp.ones((11,)))
    of_w = doublings(jnp.sum(jnp.abs(lax.stop_gradient(w))), jnp.ones((13,)))
    return w * jnp.sum(x) * jnp.sum(of_x * of_x) * jnp.sum(of_w * of_w)


def test_split_vjp_of_while_loops_is_exact():
    residuals_of(of_two_loops, array(4, 7))


def scan_of_three(x, w, v):
    def body(carry, v):
        a, b, c = carry
        return (x + a, a * 1, w * c), (b, c, v)

    (a, b, c), ys = lax.scan(body, (w, w, w), v)
    return a, b, c, *ys


@pytest.mark.parametrize(
    ("f", "args", "tainted", "outputs"),
    [
        (scan_of_three, [array(2), array(2), array(L, 2)], "100", "110100"),
        (scan_of_three, [array(2), array(2), array(L, 2)], "001", "000001"),
        # A predicate reaches every output, a branch its own.
        (
            lambda x, w: (lax.cond(x[0] > 0, lambda w: w, lambda w: -w, w), w + 1),
            [array(2), array(2)],
            "10",
            "10",
        ),
        (
            lambda flag, x, w: lax.cond(flag, lambda x, w: (w, w), lambda x, w: (w * 2, x), x, w),
            [True, array(2), array(2)],
            "010",
            "01",
        ),
        # Of a while loop also on the inputs of its condition, which decides how often it runs.
        (doublings, [1.0, array(2)], "10", "1"),
        (doublings, [1.0, array(2)], "01", "1"),
        (doublings, [1.0, array(2)], "00", "0"),
    ],
)
def test_dependence_is_told_output_by_output(f, args, tainted, outputs):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    assert dependence(jaxpr, [c == "1" for c in tainted]) == [c == "1" for c in outputs]


def products(f, *args):
    return Counter(eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns)["dot_general"]


def halves(f, weights, inputs=()):
    """Check both halves of the backward against `jax.vjp`.

    Returns:
      (shapes stashed, sorted; number of products in I; in W).
    """
    vjp, residuals, cotangent, expected = split(SplitBackwardVjp, f, weights, inputs)
    dx, stash = vjp.input_gradient(residuals, weights, inputs, cotangent)
    assert kinds(stash) == kinds(vjp.stash)
    assert_close((dx, vjp.weight_gradients(residuals, weights, inputs, stash)), expected)
    first = products(vjp.input_gradient, residuals, weights, inputs, cotangent)
    second = products(vjp.weight_gradients, residuals, weights, inputs, stash)
    return sorted(a.shape for a in stash), first, second


def rematerialised(wrap):
    return lambda x, w, _: wrap(lambda x, w: jnp.sin(x @ w["a"]) @ w["b"])(x, w)


def of_two_products(x, w, _):
    y = x * w["s"]
    return y @ w["a"], y @ w["b"]


A_AND_B = {"a": array(4, 7), "b": array(7, 5, seed=3)}


def gated(x, w, _):
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def dropped_product(x, w, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, (3, 7)), x @ w, 0)


def nested(f):
    return jax.jit(jax.checkpoint(jax.checkpoint(f)))


GATED = {"gate": array(4, 7), "up": array(4, 7, seed=3), "down": array(7, 5, seed=4)}
SCALED = {"s": array(4), "a": array(4, 6), "b": array(4, 5, seed=3)}
OF_WEIGHTS = {"a": array(3, 6), "b": array(6, 4, seed=3)}
# The result of x @ a, the source of its cotangent, and the cotangent of the output.
REMATERIALISED = ([(3, 5), (3, 7), (3, 7)], 1 + 2, 2)
HALVES = {
    "product": (lambda x, w, _: x @ w, array(4, 7), (), ([(3, 7)], 1, 1)),
    # W recomputes the cotangents of both sides, and the activation function, from residuals.
    "gate": (gated, GATED, (), ([(3, 5), (3, 7)], 3, 3)),
    "sum": (of_two_products, SCALED, (), ([(3, 4), (3, 5), (3, 6)], 2, 2)),  # of two cotangents
    "remat": (rematerialised(jax.checkpoint), A_AND_B, (), REMATERIALISED),
    "nested_remat": (rematerialised(nested), A_AND_B, (), REMATERIALISED),
    # Nothing of products of weights and of random numbers.
    "weights": (lambda x, w, _: x * (w["a"] @ w["b"]), OF_WEIGHTS, (), ([(3, 4)], 1, 2)),
    "random": (dropped_product, array(4, 7), KEY, ([(3, 7)], 1, 1)),
    # Of a loop its weight gradient.
    "loop": (
        over_layers(lambda x, w: (jnp.tanh(x @ w), None)),
        array(L, 4, 4),
        (),
        ([(L, 4, 4)], 0, 0),
    ),
    "trees": (
        lambda x, w, _: {"y": jnp.sin(x) * w["used"], "sum": jnp.sum(x * x)},
        {"used": array(4), "unused": array(6)},
        (),
        ([(3, 4)], 0, 0),
    ),
}


@pytest.mark.parametrize(("f", "weights", "inputs", "expected"), HALVES.values(), ids=HALVES)
def test_halves_of_a_backward_stash_little_and_compute_no_product_twice(
    f, weights, inputs, expected
):
    assert halves(f, weights, inputs) == expected


def test_stash_of_a_cast_and_reshaped_cotangent_is_its_source():
    def f(x, w, _):
        y = x.astype(jnp.bfloat16).reshape(-1) * w["scale"].astype(jnp.bfloat16)
        return (y.reshape(X) @ w["product"].astype(jnp.bfloat16)).astype(jnp.bfloat16)

    # bfloat16 sums in different orders, so gradients are not compared.
    weights = {"scale": array(12), "product": array(4, 7)}
    stash = SplitBackwardVjp(f, array(*X), weights, ()).stash
    assert kinds(stash) == [((3, 4), "bfloat16"), ((3, 7), "bfloat16")]
