"""Attention against NumPy in float64; `tests/hf` compares layers with those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.engines import tiny

from maxpipe.model.attention import Attention
from maxpipe.model.kernels.dot_product import attention_of_queries, dot_product_attention
from maxpipe.model.parameters import init_params, split_module
from maxpipe.sharding.attention_contract import AttentionOptions

B, T, H, K, C = 2, 7, 4, 2, 4
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)
SINKS = np.array([-1.0, 0.0, 1.0, 2.0], np.float32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]], np.int32)


def by_hand(q, k, v, segments, window=10**6, sinks=None, soft_cap=0.0):
    """Softmax over earlier tokens of the same segment; head h reads key head h // (H / K)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        group = h // (q.shape[2] // k.shape[2])
        same = [j for j in range(t + 1) if segments[b, j] == segments[b, t]]
        seen = [j for j in same if t - j < window]
        scores = np.array([q[b, t, h] @ k[b, j, group] for j in seen]) / np.sqrt(q.shape[3])
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[h])))
        out[b, t, h] = weights @ np.array([v[b, j, group] for j in seen]) / total
    return out


def qkv(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, T, heads, C)).astype(np.float32) for heads in (H, K, K)]


def make(**values):
    config = tiny(**values).model
    apply, specs = split_module(lambda: Attention(config, dot_product_attention))
    params = init_params(specs, jax.random.key(0))
    # Biases start at 0 and scales at 1, which would hide them.
    params = jax.tree.map(lambda p: p + 0.3 * jnp.cos(jnp.arange(p.size).reshape(p.shape)), params)
    x = jax.random.normal(jax.random.key(1), (B, T, config.embed_dim))
    return apply, params, x


def test_attention_and_its_options_equal_the_loop_over_queries():
    q, k, v = qkv()
    arrays = [*map(jnp.asarray, (q, k, v, SEGMENTS))]
    tokens = jnp.array([5, 0, 3])
    of_tokens = arrays[0][:, tokens], *arrays[1:], tokens
    for options in (
        {},
        {"window": 1},
        {"window": 3},
        {"soft_cap": 0.5},
        {"sinks": SINKS},
        {"window": 2, "soft_cap": 2.0, "sinks": SINKS},
    ):
        expected = by_hand(q, k, v, SEGMENTS, **options)
        # A window that differs by layer is an array.
        operands = {name: jnp.asarray(x) for name, x in options.items() if name != "soft_cap"}
        for values in (options, options | operands):
            actual = dot_product_attention(*arrays, AttentionOptions(**values))
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        actual = attention_of_queries(*of_tokens, AttentionOptions(**options))
        np.testing.assert_allclose(actual, expected[:, tokens], atol=1e-5)


def test_attention_layer_rotates_by_product_if_configured():
    (apply, params, x), (by_product, _, _) = make(), make(**{"model.rotation": "product"})
    assert "_turn" in str(jax.make_jaxpr(by_product)(params, x, POSITIONS, SEGMENTS))
    assert "_turn" not in str(jax.make_jaxpr(apply)(params, x, POSITIONS, SEGMENTS))
    np.testing.assert_array_equal(
        by_product(params, x, POSITIONS, SEGMENTS), apply(params, x, POSITIONS, SEGMENTS)
    )
