"""Embedding in a manual program against a dense one, and which stage has which tokens' loss."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.manual import manual, random
from jax import lax
from jax.sharding import PartitionSpec

from maxpipe.pipeline.engines.scheduled.ends import ShardedEmbedding, ShardedHead
from maxpipe.pipeline.manual import MANUAL_AXES, psum

P = PartitionSpec
BATCH = P(("data", "fsdp"), "context")
VOCAB, D, T = 11, 8, 4


@pytest.mark.parametrize(
    "columns", ["", "stage", "stage fsdp", "fsdp stage", "data stage fsdp", "fsdp context"]
)
def test_embedding_of_any_columns_equals_a_dense_lookup(columns):
    """Every stage gets the same activations; only stage 0's gradient counts."""
    axes = {"stage": 2, "fsdp": 2, "context" if "context" in columns else "data": 2}
    spec, rows = P(None, tuple(columns.split())), 8
    embedding = ShardedEmbedding(spec, jnp.float32)
    table, gradient = random(VOCAB, D), random(rows, T, D, seed=1)
    tokens = np.random.default_rng(2).integers(0, VOCAB, (rows, T)).astype(np.int32)

    def run(table, tokens, gradient):
        only_first = jnp.where(lax.axis_index("stage") == 0, gradient, jnp.nan)
        total = embedding.add_gradient(jnp.ones_like(table), tokens, only_first) - 1
        total = psum(total, tuple(axis for axis in MANUAL_AXES if axis not in columns.split()))
        return embedding.lookup(table, tokens)[None], total

    lookup, total = manual(run, (spec, BATCH, BATCH), (P("stage", *BATCH), spec), **axes)(
        table, tokens, gradient
    )
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, gradient)
    for stage in lookup:
        np.testing.assert_array_equal(stage, table[tokens])
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("stages", "rows"), [(1, 2), (2, 2), (2, 1), (4, 4), (4, 1), (4, 3), (8, 1)]
)
def test_head_shares_of_all_stages_are_every_token_once(stages, rows):
    """Also where the stages do not divide the tokens, or there are fewer tokens than stages."""
    head = ShardedHead(None, stages)
    y, rng = random(rows, T, D, seed=4), np.random.default_rng(3)
    targets = rng.integers(0, VOCAB, (rows, T)).astype(np.int32)
    weights = rng.choice([0.0, 1.0, 2.0], (rows, T)).astype(np.float32)

    def share(y, targets, weights):
        only_last = jnp.where(lax.axis_index("stage") == stages - 1, y, jnp.nan)
        return head.share(only_last, targets, weights)

    specs = P("stage"), P("stage"), P("stage")
    x, share_targets, share_weights = manual(share, (P(), P(), P()), specs, stage=stages)(
        y, targets, weights
    )
    tokens, size = rows * T, stages * -(-rows * T // stages)
    assert x.shape == (size, D)
    np.testing.assert_array_equal(x[:tokens], y.reshape(-1, D))
    np.testing.assert_array_equal(share_targets[:tokens], targets.reshape(-1))
    np.testing.assert_array_equal(share_weights[:tokens], weights.reshape(-1))
    assert not share_weights[tokens:].any()
