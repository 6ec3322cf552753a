"""Applying the layers of a chunk, with a model whose layers are easy to follow."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.model.layers import SideInputs
from maxpipe.pipeline.chunk import apply_layers, layer_function

NUM_LAYERS = 3
X = jnp.ones((2, 1, 1))
SIDE = SideInputs(*jnp.zeros((3, 2, 1), jnp.int32))


class Affine:
    """x -> 2 x + weight, auxiliary loss = weight; with a key, plus a number drawn from it."""

    config = SimpleNamespace(num_layers=NUM_LAYERS, stacked_layers=NUM_LAYERS, first_dense_layers=0)

    def __init__(self, needs_key=False):
        self.needs_key = needs_key

    def block(self, layer, x, side, key):
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
    layer_fn = layer_function(Affine(needs_key=True), lambda layer: layer, padded=False)
    key = jax.random.key(7)
    x, _ = apply(layer_fn, [0], [2], scan=True, key=key)
    assert x[0, 0, 0] == pytest.approx(2 + float(jax.random.uniform(jax.random.fold_in(key, 2))))


def test_layer_function_without_dropout_folds_no_key():
    layer_fn = layer_function(Affine(needs_key=False), lambda layer: layer, padded=False)
    x, _ = apply(layer_fn, [0], [2], scan=True, key=jax.random.key(7))
    assert (x == 2).all()


def test_layer_function_prepares_each_layer():
    layer_fn = layer_function(
        Affine(), lambda layer: {"weight": 10 * layer["weight"]}, padded=False
    )
    x, _ = apply(layer_fn, [1], [0], scan=False)
    assert (x == 12).all()
