"""Norm, products, gating and dropout; `tests/hf` compares MLPs with those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.model.block import LlamaBlock
from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.model.layers import GatedMLP, RMSNorm, SideInputs, dropout, project
from maxpipe.model.parameters import init_params, split_module


def norm(*sizes, **options):
    return split_module(lambda: RMSNorm(*sizes, eps=1e-3, dtype="float32", **options))


def test_rms_norm_equals_numpy_also_with_an_offset_and_over_all_heads():
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    scale = np.linspace(0.5, 2, 6, dtype=np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(norm(6)[0]({"scale": scale}, x), expected, rtol=1e-5)
    apply, specs = norm(6, offset=True)
    assert not np.any(init_params(specs, jax.random.key(0))["scale"])
    np.testing.assert_allclose(apply({"scale": scale - 1}, x), expected, rtol=1e-5)
    apply, _ = norm(2, 3, axes=("heads", "head_dim"))  # takes one mean
    actual = apply({"scale": scale.reshape(2, 3)}, x.reshape(3, 2, 3))
    np.testing.assert_allclose(actual.reshape(3, 6), expected, rtol=1e-5)
    # In bfloat16 it is computed in float32.
    y = norm(256)[0]({"scale": jnp.full((256,), 1.0)}, jnp.full((256,), 300.0, jnp.bfloat16))
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


@pytest.mark.parametrize(
    ("gating", "by_hand", "count"),
    [("fused", True, 0), ("separate", True, 2), ("separate", False, 0)],
)
def test_residual_stream_is_row_major_with_separate_gating_where_programs_are_split_by_hand(
    gating, by_hand, count
):
    config = tiny(**{"model.gating": gating}).model
    apply, specs = split_module(lambda: LlamaBlock(config, dot_product_attention))
    params = init_params(specs, jax.random.key(0))
    ids = jnp.ones((2, 8), jnp.int32)
    side = SideInputs(ids, ids, ids[:, 0], jnp.int32(0))

    def layer(x):
        return apply(params, x, side, None)[0]

    if by_hand:
        mesh = Mesh(jax.devices()[:1], ("data",))
        layer = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    traced = jax.make_jaxpr(layer)(jnp.zeros((2, 8, config.embed_dim)))
    assert str(traced).count("layout_constraint[") == count


@pytest.fixture
def dropped():
    """dropped(rows) -> dropout of rows of a global batch of ones, [rows, tokens, 20].

    Rows have two segments, of 30 and 20 tokens.
    """

    def _dropped(rows, key=0, tokens=range(50)):
        tokens = np.array(tokens)
        x = jnp.ones((len(rows), len(tokens), 20), jnp.bfloat16)
        positions = np.where(tokens < 30, tokens, tokens - 30)
        segment_ids = 1 + (tokens >= 30)
        side = SideInputs(
            positions=jnp.asarray(np.tile(positions, (len(rows), 1)), jnp.int32),
            segment_ids=jnp.asarray(np.tile(segment_ids, (len(rows), 1)), jnp.int32),
            sequence_index=jnp.asarray(rows, jnp.int32),
        )
        y = dropout(x, 0.25, jax.random.key(key), side)
        assert y.dtype == jnp.bfloat16
        return np.float32(y)

    return _dropped


def test_dropout_of_ones_has_mean_one_and_differs_by_row_by_token_and_by_key(dropped):
    full = dropped(range(8))
    assert set(np.unique(full)) == {0, float(jnp.bfloat16(1 / 0.75))}
    assert full.mean() == pytest.approx(1, abs=0.02)
    assert (full[0] != full[1]).any()
    assert len(np.unique(full[:3].reshape(-1, 20), axis=0)) > 140  # of 150 tokens
    assert (full[0] != dropped(range(3), key=1)[0]).any()


def test_dropout_does_not_depend_on_other_rows_or_tokens(dropped):
    full = dropped(range(8))
    for rows in ([0], [5], [1, 3, 7], [6, 2]):
        np.testing.assert_array_equal(dropped(rows), full[rows])
    for tokens in ([0], range(25, 35), [49, 3, 30]):
        np.testing.assert_array_equal(dropped(range(8), tokens=tokens), full[:, tokens])


def operands(contracted, dtype=jnp.float32):
    x_key, w_key = jax.random.split(jax.random.key(0))
    x_shape, w_shape = {1: ((2, 3, 4), (4, 5, 6)), 2: ((2, 3, 4, 5), (4, 5, 6))}[contracted]
    return jax.random.normal(x_key, x_shape, dtype), jax.random.normal(w_key, w_shape, dtype)


@pytest.mark.parametrize(("contracted", "letters"), [(1, "bti,iho->btho"), (2, "btih,iho->bto")])
def test_project_and_its_gradients_equal_einsums(contracted, letters):
    def loss(product):
        return lambda x, w: jnp.sum(jnp.sin(product(x, w)))

    arrays = operands(contracted)
    expected = jax.value_and_grad(loss(lambda x, w: jnp.einsum(letters, x, w)), (0, 1))(*arrays)
    actual = jax.value_and_grad(loss(lambda x, w: project(x, w, contracted)), (0, 1))(*arrays)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )


def test_project_returns_the_requested_dtype_and_gradients_of_operand_dtype():
    x, w = operands(1, jnp.bfloat16)
    assert project(x, w).dtype == jnp.bfloat16
    product, gradients = jax.vjp(lambda x, w: project(x, w, 1, jnp.float32), x, w)
    np.testing.assert_allclose(
        product, jnp.einsum("bti,iho->btho", x.astype(jnp.float32), w), rtol=1e-5, atol=1e-5
    )
    assert [g.dtype for g in gradients(product)] == [jnp.bfloat16, jnp.bfloat16]


def test_project_gradients_are_summed_in_the_requested_dtype_without_a_transpose():
    """In bfloat16 over devices too, where the partitioner makes a sum of each part's."""

    def gradients(x, w, cotangent):
        return jax.vjp(lambda x, w: project(x, w, 1, jnp.float32), x, w)[1](cotangent)

    x, w = operands(1, jnp.bfloat16)
    program = jax.make_jaxpr(gradients)(x, w, project(x, w, 1, jnp.float32))
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in products[-2:]] == [jnp.float32, jnp.float32]
    assert "transpose[" not in str(program)
