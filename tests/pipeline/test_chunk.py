"""Applying the layers of a chunk, with a model whose layers are easy to follow."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.config.catalog import RematPolicy
from maxpipe.model.layers import SideInputs
from maxpipe.pipeline.chunk import apply_first_layers, apply_layers, layer_function, sum_where

NUM_LAYERS = 3
X = jnp.ones((2, 1, 1))
SIDE = SideInputs(*jnp.zeros((3, 2, 1), jnp.int32))


class Affine:
    """x -> 2 x + weight, auxiliary loss = weight; with a key, plus a number drawn from it."""

    def __init__(self, needs_key=False, num_first=0):
        self.needs_key = needs_key
        self.config = SimpleNamespace(stacked_layers=NUM_LAYERS, first_dense_layers=num_first)

    def block(self, layer, x, side, key):
        self.layer_index = side.layer_index
        noise = 0 if key is None else jax.random.uniform(key)
        return 2 * x + layer["weight"] + noise, layer["weight"]


def apply(layer_fn, weights, index, *, scan, key=None):
    layers = {"weight": jnp.asarray(weights, jnp.float32)}
    index = jnp.asarray(index, jnp.int32)
    return apply_layers(layer_fn, layers, index, X, SIDE, key, scan=scan)


@pytest.mark.parametrize("scan", [True, False])
def test_apply_layers_runs_in_order_and_sums_auxiliary_losses(scan):
    layer_fn = layer_function(Affine(), lambda layer: layer, padded=False)
    x, aux = apply(layer_fn, [1, 2, 3], [0, 1, 2], scan=scan)
    assert (x == 2 * (2 * (2 + 1) + 2) + 3).all()
    assert aux == 6


@pytest.mark.parametrize("scan", [True, False])
def test_apply_layers_with_padding_leaves_activations_and_losses_alone(scan):
    layer_fn = layer_function(Affine(), lambda layer: layer, padded=True)
    x, aux = apply(layer_fn, [1, np.nan, np.inf], [2, NUM_LAYERS, NUM_LAYERS], scan=scan)
    assert (x == 3).all()
    assert aux == 1


def test_layer_function_folds_the_model_order_index_into_the_key():
    """Layers with other parameters come first, and have numbers of their own."""
    program, key = Affine(needs_key=True, num_first=2), jax.random.key(7)
    layer_fn = layer_function(program, lambda layer: layer, padded=False)
    x, _ = apply(layer_fn, [0], [2], scan=False, key=key)
    key_of_layer = jax.random.fold_in(key, 2 + 2)
    assert x[0, 0, 0] == pytest.approx(2 + float(jax.random.uniform(key_of_layer)))
    assert program.layer_index == 2 + 2


def test_layers_know_their_number_in_the_whole_model():
    """The first ones, with parameters of their own, and those of the pipeline after them."""

    def block(layer, x, side, key):
        return 10 * x + side.layer_index, {}

    config = tiny("num_layers=6 first_dense_layers=2 moe.experts=4 moe.mlp_dim=16").model
    program = SimpleNamespace(config=config, needs_key=False, block=block)
    program.first_block = lambda *args: block(*args)[0]
    side, first = SideInputs(None, None, None), {"0": {}, "1": {}}
    x = apply_first_layers(program, first, lambda p: p, RematPolicy(), jnp.int32(9), side, None)
    apply = layer_function(program, lambda p: p, padded=False)
    for i in range(config.stacked_layers):
        x, _ = apply({}, jnp.int32(i), x, side, None)
    assert x == 9_012_345


def test_sum_where_leaves_out_parts_that_do_not_count_whatever_they_hold():
    aux = {"scalar": jnp.array([1.0, jnp.nan, 3.0]), "rows": jnp.arange(24.0).reshape(3, 2, 4)}
    total = sum_where(jnp.array([True, False, True]), aux)
    assert total["scalar"] == 4
    np.testing.assert_array_equal(total["rows"], aux["rows"][0] + aux["rows"][2])
