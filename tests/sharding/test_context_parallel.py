"""Places of tokens, and attention in parts compared with attention of full sequences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.config.catalog import KERNELS
from maxpipe.config.imports import implementation
from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.sharding.attention_contract import PLAIN, AttentionOptions
from maxpipe.sharding.context_parallel import in_order, in_places, over_context, parts


def test_parts_hold_every_token_once_and_have_equal_work():
    for length, count in ((8, 1), (8, 2), (24, 3), (32, 4)):
        tokens = parts(length, count)
        assert tokens.shape == (count, length // count)
        assert sorted(tokens.reshape(-1)) == list(range(length))
        # A query looks at the keys up to its own.
        assert len(set((tokens + 1).sum(axis=1))) == 1
    np.testing.assert_array_equal(parts(12, 3), [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]])


def test_in_places_then_in_order_is_exact():
    x = jnp.arange(24).reshape(2, 12)
    for count in (1, 2, 3):
        placed = in_places(x, count)
        np.testing.assert_array_equal(placed, x[:, parts(12, count).reshape(-1)])
        np.testing.assert_array_equal(in_order(placed, count), x)
        deeper = jnp.stack([placed, -placed], axis=2)
        np.testing.assert_array_equal(in_order(deeper, count), jnp.stack([x, -x], axis=2))


def loss_and_gradients(attention, weights, segments, *qkv):
    def loss(*qkv):
        y = attention(*qkv, segments)
        return jnp.sum(y * weights), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return y, *gradients


def check_parts(kernel, config, length, count, attention_options=PLAIN, **options):
    """A kernel with queries on `count` devices has the outputs and gradients of one device."""
    rng = np.random.default_rng(0)
    heads = config.num_query_heads, config.num_kv_heads, config.num_kv_heads, config.num_query_heads
    *qkv, weights = (
        jnp.asarray(rng.standard_normal((2, length, n, config.head_dim)), jnp.float32)
        for n in heads
    )
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, length)), axis=1), jnp.int32)
    reference = partial(dot_product_attention, options=attention_options)
    expected = loss_and_gradients(reference, weights, segments, *qkv)

    def placed(x):
        return x[:, parts(length, count).reshape(-1)]

    build = implementation(KERNELS[kernel]).build_for_parts
    attention = over_context(build(config, parts(length, count), **options))
    attention = partial(attention, options=attention_options)
    mesh, over = Mesh(np.array(jax.devices()[:count]), ("context",)), P(None, "context")
    specs = {"mesh": mesh, "in_specs": (over,) * 5, "out_specs": (over,) * 4}
    run = jax.shard_map(partial(loss_and_gradients, attention), **specs, check_vma=False)
    actual = jax.jit(run)(*map(placed, (weights, segments, *qkv)))
    for a, b in zip(actual, expected, strict=True):
        assert jnp.max(jnp.abs(a - placed(b))) <= 1e-5 * jnp.max(jnp.abs(b))


@pytest.mark.parametrize(
    ("count", "options"), [(2, {}), (3, {"window": 3}), (2, {"soft_cap": 1.0})]
)
def test_dot_product_of_parts_equals_the_full_sequence(count, options):
    check_parts("dot_product", tiny().model, 12, count, AttentionOptions(**options))


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"window": 60, "soft_cap": 2.0}),
        (2, {"window": np.int32(2**30)}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(1, {"window": np.int32(60)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_splash_of_parts_equals_dot_product_of_the_full_sequence(count, options):
    """Interpreted; one device has two chunks as well. Windows of layers that differ are arrays."""
    values = {
        "model.num_query_heads": 2,
        "model.num_kv_heads": 1,
        "model.head_dim": 128,
        "model.attention_window": 60,  # shorter than a segment and than a block
    }
    if isinstance(options.get("window"), np.int32):
        options = {"window": jnp.asarray(options["window"])}
    model, options = tiny(**values).model, AttentionOptions(**options)
    check_parts("splash", model, 512, count, options, interpret=True)
