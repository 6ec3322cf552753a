"""Declaring parameters, and initial values that depend on (key, path, layer index) only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxpipe.model.parameters import (
    ParamSpec,
    count,
    declare,
    init_layers,
    init_params,
    split_module,
)


class Pair(nnx.Module):
    def __init__(self):
        self.b = declare((2, 3), ("embed", "mlp"), "float32", stddev=0.5)
        self.a = declare((4,), ("norm",), "bfloat16", fill=1.0)

    def __call__(self, x):
        return x @ self.b[...]

    def scaled(self, x, *, by):
        return x * self.a[...] * by


def test_split_module_returns_a_function_and_specs():
    apply, specs = split_module(Pair)
    assert specs == {
        "a": ParamSpec((4,), jnp.dtype("bfloat16"), ("norm",), 0.0, 1.0),
        "b": ParamSpec((2, 3), jnp.dtype("float32"), ("embed", "mlp"), 0.5, 0.0),
    }
    params = {"a": jnp.arange(4.0), "b": jnp.ones((2, 3))}
    assert apply(params, jnp.ones((1, 2))).tolist() == [[2, 2, 2]]
    assert apply(params, jnp.ones(4), method="scaled", by=2).tolist() == [0, 2, 4, 6]


def test_split_module_allocates_nothing():
    class Huge(nnx.Module):
        def __init__(self):
            self.weight = declare((2**20, 2**20), ("embed", "mlp"), "float32")

    _, specs = split_module(Huge)
    assert count(specs) == 2**40


def test_init_params_draws_the_declared_distribution():
    spec = ParamSpec((200, 300), jnp.dtype("float32"), ("a", "b"), stddev=0.02, fill=1.0)
    values = spec.init(jax.random.key(0))
    assert values.mean() == pytest.approx(1, abs=1e-3)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    spec = ParamSpec((3,), jnp.dtype("bfloat16"), ("a",), stddev=0.0, fill=0.5)
    constant = spec.init(jax.random.key(0))
    assert constant.dtype == jnp.bfloat16
    assert (constant == 0.5).all()


def test_init_params_of_one_parameter_does_not_depend_on_others():
    spec = ParamSpec((4,), jnp.dtype("float32"), ("a",), stddev=1.0)
    alone = init_params({"outer": {"w": spec}}, jax.random.key(3))["outer"]["w"]
    among = init_params({"outer": {"a": spec, "w": spec}, "other": spec}, jax.random.key(3))
    assert (among["outer"]["w"] == alone).all()
    assert (among["outer"]["a"] != alone).all()
    assert (init_params({"outer": {"w": spec}}, jax.random.key(4))["outer"]["w"] != alone).all()


def test_init_layers_does_not_depend_on_the_arrangement():
    specs = {"w": ParamSpec((5,), jnp.dtype("float32"), ("a",), stddev=1.0)}
    order = np.random.default_rng(0).permutation(12)
    in_order = init_layers(specs, jax.random.key(0), jnp.arange(12))["w"]
    assert len(np.unique(in_order)) == 60
    for shape in ((12,), (2, 2, 3), (3, 4, 1), (12, 1, 1)):
        arranged = init_layers(specs, jax.random.key(0), jnp.asarray(order.reshape(shape)))["w"]
        assert arranged.shape == (*shape, 5)
        np.testing.assert_array_equal(np.asarray(arranged).reshape(12, 5), in_order[order])
