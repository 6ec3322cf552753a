"""Latent attention against NumPy in float64, from its equations in DeepSeek-V2, 2024."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.model.kernels.splash import Splash
from maxpipe.model.latent_attention import NORM_EPS, LatentAttention
from maxpipe.model.parameters import init_params, split_module
from maxpipe.sharding.attention_contract import OverLatents

B, T, H = 2, 6, 4
N, R, V, L = 6, 4, 5, 7
WIDTHS = {
    "model.attention_kind": "mla",
    "model.num_kv_heads": H,
    "model.mla.kv_lora_rank": L,
    "model.mla.qk_nope_head_dim": N,
    "model.mla.qk_rope_head_dim": R,
    "model.mla.v_head_dim": V,
}
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], np.int32)


def make(attention=dot_product_attention, **values):
    config = tiny(**WIDTHS | values).model
    apply, specs = split_module(lambda: LatentAttention(config, attention))
    params = init_params(specs, jax.random.key(0))
    # Scales of norms start at 1, which would hide them.
    params = jax.tree.map(lambda p: p + 0.3 * jnp.cos(jnp.arange(p.size).reshape(p.shape)), params)
    return config, apply, params, jax.random.normal(jax.random.key(1), (B, T, config.embed_dim))


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + NORM_EPS) * scale


def turned(x, position):
    frequencies = 10000.0 ** -(np.arange(0, R, 2) / R)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * position * frequencies)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def by_hand(params, x):
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.asarray(x, np.float64)
    if "query" in p:
        q = np.einsum("btd,dhc->bthc", x, p["query"])
    else:
        down = norm(x @ p["query_down"], p["query_latent_norm"]["scale"])
        q = np.einsum("btq,qhc->bthc", down, p["query_up"])
    down = x @ p["key_value_down"]
    latent = norm(down[..., :L], p["key_value_latent_norm"]["scale"])
    up = np.einsum("btl,lhc->bthc", latent, p["key_value_up"])
    y = np.zeros_like(x)
    for b, t, h in np.ndindex(B, T, H):
        seen = [j for j in range(t + 1) if SEGMENTS[b, j] == SEGMENTS[b, t]]
        scores = []
        for j in seen:
            q_rope = turned(q[b, t, h, N:], POSITIONS[b, t])
            k_rope = turned(down[b, j, L:], POSITIONS[b, j])
            scores.append((q[b, t, h, :N] @ up[b, j, h, :N] + q_rope @ k_rope) / np.sqrt(N + R))
        weights = np.exp(scores) / np.exp(scores).sum()
        context = weights @ np.array([up[b, j, h, N:] for j in seen])
        y[b, t] += context @ p["out"][h]
    return y


@pytest.mark.parametrize("attention", [dot_product_attention, OverLatents(dot_product_attention)])
@pytest.mark.parametrize("rank", [0, 3])
def test_output_is_that_of_the_equations_with_and_without_keys_of_heads(attention, rank):
    values = {"model.mla.q_lora_rank": rank, "model.rope_interleaved": True}
    _, apply, params, x = make(attention, **values)
    expected = by_hand(params, x)
    actual = jax.jit(apply)(params, x, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert params["key_value_down"].shape == (16, L + R)  # all heads share the rotated key


def test_cache_holds_the_latent_and_one_rotated_key_of_each_token():
    widths = []

    def attention(q, k, v, segment_ids, options):
        widths.append((k.shape, v.shape))
        np.testing.assert_array_equal(k[..., :L], v)
        return dot_product_attention(q, k, v, segment_ids, options)

    config, apply, params, x = make(OverLatents(attention))
    apply(params, x, POSITIONS, SEGMENTS)
    assert widths == [((B, T, 1, config.mla.cached_width), (B, T, 1, L))]


def test_splash_fills_up_channels_without_a_difference():
    length, heads, channels, value_channels = 128, 2, 136, 16
    config = tiny(**{"data.sequence_length": length, **WIDTHS}).model
    assert not Splash.unfit(config, length, 1)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, length, heads, width)), jnp.float32)
        for width in (channels, channels, value_channels)
    )
    segments = jnp.asarray(np.repeat([[1, 2]], 64, axis=1), jnp.int32)
    splash = Splash.build(config, length, interpret=True)

    def loss(attention, q, k, v):
        context = attention(q, k, v, segments)
        return jnp.sum(jnp.sin(3 * context)), context

    results = [
        jax.grad(loss, argnums=(1, 2, 3), has_aux=True)(attention, q, k, v)
        for attention in (splash, dot_product_attention)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=3e-5)
