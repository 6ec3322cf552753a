"""Parameters of a chunk read layer by layer, and their gradients added where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.pipeline.engines.scheduled.carry import Carry, add_to_layers, filled, read, read_layers

V, L = 3, 2


def stores():
    return {
        "norm": jnp.arange(V * L * 4, dtype=jnp.float32).reshape(V, L, 4),
        "out": jnp.arange(V * L * 6, dtype=jnp.float32).reshape(V, L, 2, 3),
    }


@pytest.mark.parametrize("chunk", range(V))
def test_layers_of_a_chunk_are_its_slices(chunk):
    layers = jax.jit(read_layers)(stores(), chunk)
    whole = jax.tree.map(lambda a: read(a, chunk), stores())
    assert len(layers) == L
    for i, layer in enumerate(layers):
        expected = jax.tree.map(lambda a, i=i: a[i], whole)
        jax.tree.map(np.testing.assert_array_equal, layer, expected)


@pytest.mark.parametrize("active", [True, False])
def test_gradients_of_single_layers_are_added_as_those_of_all_are(active):
    totals, gradients = stores(), jax.tree.map(lambda a: a[0] + 0.5, stores())
    empty = dict.fromkeys(Carry._fields) | {"layer_gradients": totals}

    def sums(gradients):
        add = jax.jit(lambda g: add_to_layers(Carry(**empty), active, jnp.int32(1), g))
        return add(gradients).layer_gradients

    by_layer = sums(tuple(jax.tree.map(lambda g, i=i: g[i], gradients) for i in range(L)))
    jax.tree.map(np.testing.assert_array_equal, by_layer, sums(gradients))
    expected = totals["out"].at[1].add(active * gradients["out"])
    np.testing.assert_array_equal(by_layer["out"], expected)


def test_filled_leaves_floats_as_they_are_on_accelerators_without_a_value():
    def stores(value):
        return filled((2, 3), jnp.float32, value), filled((2,), jnp.int32, value)

    def lowered(value, platform):
        traced = jax.jit(stores, static_argnums=0).trace(value)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for platform in ("tpu", "cuda"):
        assert lowered(None, platform).count("AllocateBuffer") == 1
        assert "AllocateBuffer" not in lowered(0.0, platform)
    for value in (None, 0.0, np.nan):
        np.testing.assert_array_equal(stores(value)[1], 0)
    assert np.isnan(stores(np.nan)[0]).all()
