"""Embedding and head in a manual program, against dense ones on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.manual import manual, mesh_of, random
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


def test_embedding_with_rows_over_an_automatic_axis_equals_a_dense_lookup():
    """The default rules lay the vocabulary over tensor."""
    axes = {"stage": 2, "fsdp": 2, "tensor": 2}
    spec = P("tensor", ("stage", "fsdp"))
    embedding = ShardedEmbedding(spec, jnp.bfloat16)
    table, tokens = random(16, D), np.arange(16, dtype=np.int32).reshape(4, T)

    def run(table, tokens, gradient):
        return embedding.lookup(table, tokens), embedding.add_gradient(
            jnp.zeros_like(table), tokens, gradient
        )

    specs = P(None, ("stage", "fsdp"))
    table = jax.device_put(table, jax.NamedSharding(mesh_of(**axes), spec))
    lookup, total = manual(run, (specs, BATCH, BATCH), (BATCH, specs), **axes)(
        table, tokens, table[tokens]
    )
    assert lookup.dtype == jnp.bfloat16
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(lookup, table[tokens].astype(jnp.bfloat16))
    np.testing.assert_array_equal(total, table)


def head_loss(outer, x, targets, weights):
    """Return (loss, cross-entropy) sums as `ModelProgram.head_loss` does; the two differ."""
    logits = x @ outer["kernel"]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    cross_entropy = jnp.sum(weights * (log_z - picked))
    return cross_entropy + 0.1 * jnp.sum(weights * log_z**2), cross_entropy


def head_inputs(rows):
    rng = np.random.default_rng(3)
    targets = rng.integers(0, VOCAB, (rows, T)).astype(np.int32)
    weights = rng.choice([0.0, 1.0, 2.0], (rows, T)).astype(np.float32)
    return {"kernel": random(D, VOCAB)}, random(rows, T, D, seed=4), targets, weights


@pytest.mark.parametrize(
    ("stages", "rows"), [(1, 2), (2, 2), (2, 1), (4, 4), (4, 1), (4, 3), (8, 1)]
)
def test_head_shares_of_all_stages_are_every_token_once(stages, rows):
    """Also where the stages do not divide the tokens, or there are fewer tokens than stages."""
    head = ShardedHead(head_loss, stages)
    _, y, targets, weights = head_inputs(rows)

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


@pytest.mark.parametrize(
    ("stages", "data", "rows"), [(1, 1, 2), (2, 2, 4), (4, 1, 1), (4, 2, 6), (8, 1, 1)]
)
def test_head_loss_and_gradients_equal_dense_ones(stages, data, rows):
    head = ShardedHead(head_loss, stages)
    outer, y, targets, weights = head_inputs(rows)
    scale = jnp.float32(0.25)

    def run(outer, y, targets, weights, scale):
        only_last = jnp.where(lax.axis_index("stage") == stages - 1, y, jnp.nan)
        (loss, _), gradient, outer_gradient = head.losses_and_gradients(
            outer, only_last, targets, weights, (scale, scale)
        )
        sums = (
            psum(loss, MANUAL_AXES),
            psum(head.losses(outer, only_last, targets, weights)[1], MANUAL_AXES),
        )
        return *sums, gradient[None], jax.tree.map(lambda g: psum(g, MANUAL_AXES), outer_gradient)

    in_specs, out_specs = (P(), BATCH, BATCH, BATCH, P()), (P(), P(), P("stage", BATCH[0]), P())
    actual = manual(run, in_specs, out_specs, stage=stages, data=data)(
        outer, y, targets, weights, scale
    )

    def dense(outer, y):
        losses = head_loss(outer, y.reshape(-1, D), targets.ravel(), weights.ravel())
        return scale * losses[0], losses

    gradient = jax.value_and_grad(dense, argnums=(0, 1), has_aux=True)
    (_, sums), gradients = gradient(outer, jnp.asarray(y))
    np.testing.assert_allclose(actual[:2], sums, rtol=1e-5)
    np.testing.assert_allclose(actual[3]["kernel"], gradients[0]["kernel"], rtol=1e-4, atol=1e-6)
    for stage in actual[2]:
        np.testing.assert_allclose(stage, gradients[1], rtol=1e-4, atol=1e-6)
