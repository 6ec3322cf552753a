"""Norm, gated MLP and dropout by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.model.layers import GatedMLP, RMSNorm, SideInputs, dropout
from maxpipe.model.parameters import init_params, split_module


def test_rms_norm_equals_numpy():
    apply, _ = split_module(lambda: RMSNorm(6, eps=1e-3, dtype="float32"))
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    scale = np.linspace(0.5, 2, 6, dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(
        apply({"scale": jnp.asarray(scale)}, jnp.asarray(x)), expected, rtol=1e-5
    )


def test_rms_norm_with_offset_starts_as_a_plain_norm_and_adds_one_to_the_scale():
    apply, specs = split_module(lambda: RMSNorm(6, eps=1e-3, dtype="float32", offset=True))
    plain, _ = split_module(lambda: RMSNorm(6, eps=1e-3, dtype="float32"))
    x = jax.random.normal(jax.random.key(0), (3, 6))
    start = init_params(specs, jax.random.key(0))
    assert not np.any(start["scale"])
    scale = jnp.linspace(-0.5, 0.5, 6)
    np.testing.assert_allclose(
        apply({"scale": scale}, x), plain({"scale": 1 + scale}, x), rtol=1e-6
    )


def test_rms_norm_of_all_heads_takes_one_mean():
    apply, _ = split_module(
        lambda: RMSNorm(2, 3, eps=1e-3, dtype="float32", axes=("heads", "head_dim"))
    )
    one, _ = split_module(lambda: RMSNorm(6, eps=1e-3, dtype="float32"))
    x, scale = jax.random.normal(jax.random.key(0), (2, 4, 2, 3)), jnp.linspace(0.5, 2, 6)
    actual = apply({"scale": scale.reshape(2, 3)}, x)
    expected = one({"scale": scale}, x.reshape(2, 4, 6))
    np.testing.assert_allclose(actual.reshape(2, 4, 6), expected, rtol=1e-6)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    apply, _ = split_module(lambda: RMSNorm(256, eps=1e-5, dtype="float32"))
    x = jnp.full((256,), 3.0, jnp.bfloat16)
    y = apply({"scale": jnp.full((256,), 1.0)}, x)
    assert y.dtype == jnp.bfloat16
    assert (y == 1).all()


def test_gated_mlp_with_separate_gating_has_the_bits_of_the_fused_one():
    results = {}
    for gating in ("fused", "separate"):
        config = tiny(**{"model.gating": gating, "model.mlp_limit": 0.5}).model
        apply, specs = split_module(lambda config=config: GatedMLP(config))
        params = init_params(specs, jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, 3, config.embed_dim))
        step = jax.value_and_grad(lambda params, x, apply=apply: apply(params, x).sum(), (0, 1))
        # One array is kept from being fused forward, and two backward.
        barriers = str(jax.make_jaxpr(step)(params, x)).count("optimization_barrier")
        assert barriers == {"fused": 0, "separate": 2}[gating]
        results[gating] = step(params, x)
    jax.tree.map(np.testing.assert_array_equal, results["fused"], results["separate"])


def test_gated_mlp_equals_numpy():
    config = tiny().model
    apply, specs = split_module(lambda: GatedMLP(config))
    params = init_params(specs, jax.random.key(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 3, config.embed_dim)), np.float64)
    gate, up, down = (np.asarray(params[name], np.float64) for name in ("gate", "up", "down"))
    hidden = x @ gate
    expected = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    np.testing.assert_allclose(apply(params, jnp.asarray(x, jnp.float32)), expected, atol=1e-5)


def test_gated_mlp_with_gelu_and_biases_equals_numpy():
    config = tiny(**{"model.mlp_activation": "gelu_tanh", "model.mlp_bias": True}).model
    apply, specs = split_module(lambda: GatedMLP(config))
    params = init_params(specs, jax.random.key(0))
    params = {n: p + 0.1 * jnp.cos(jnp.arange(p.size).reshape(p.shape)) for n, p in params.items()}
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 3, config.embed_dim)), np.float64)
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    gate = x @ p["gate"] + p["gate_bias"]
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    expected = (gelu * (x @ p["up"] + p["up_bias"])) @ p["down"] + p["down_bias"]
    np.testing.assert_allclose(apply(params, jnp.asarray(x, jnp.float32)), expected, atol=2e-5)


@pytest.fixture
def dropped():
    """dropped(rows) -> dropout of rows of a global batch of ones, [rows, tokens, 20].

    Rows have two segments, of 30 and 20 tokens.
    """

    def _dropped(rows, key=0, rate=0.25, tokens=range(50)):
        tokens = np.array(tokens)
        x = jnp.ones((len(rows), len(tokens), 20))
        positions = np.where(tokens < 30, tokens, tokens - 30)
        segment_ids = 1 + (tokens >= 30)
        side = SideInputs(
            positions=jnp.asarray(np.tile(positions, (len(rows), 1)), jnp.int32),
            segment_ids=jnp.asarray(np.tile(segment_ids, (len(rows), 1)), jnp.int32),
            sequence_index=jnp.asarray(rows, jnp.int32),
        )
        return np.asarray(dropout(x, rate, jax.random.key(key), side))

    return _dropped


def test_dropout_of_ones_has_mean_one(dropped):
    y = dropped(range(8))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
    assert y.mean() == pytest.approx(1, abs=0.02)


def test_dropout_of_a_row_does_not_depend_on_other_rows(dropped):
    full = dropped(range(8))
    for rows in ([0], [5], [1, 3, 7], [6, 2]):
        np.testing.assert_array_equal(dropped(rows), full[rows])


def test_dropout_of_a_token_does_not_depend_on_other_tokens(dropped):
    full = dropped(range(2))
    for tokens in ([0], range(25, 35), [49, 3, 30]):
        np.testing.assert_array_equal(dropped(range(2), tokens=tokens), full[:, tokens])


def test_dropout_differs_by_row_by_token_and_by_key(dropped):
    full = dropped(range(3))
    assert (full[0] != full[1]).any()
    assert len(np.unique(full.reshape(-1, 20), axis=0)) > 140  # of 150 tokens
    assert (full[0] != dropped(range(3), key=1)[0]).any()


def test_dropout_of_bfloat16_is_bfloat16():
    x, tokens = jnp.ones((1, 2, 3), jnp.bfloat16), jnp.zeros((1, 2), jnp.int32)
    side = SideInputs(tokens, tokens, sequence_index=jnp.zeros(1, jnp.int32))
    assert dropout(x, 0.5, jax.random.key(0), side).dtype == jnp.bfloat16
