"""The model as functions: sizes, what a token can see, and the losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import TINY, canonical_params, make_batch, tiny
from test_presets import PARAMETERS, for_slice

from maxpipe.config import Config, catalog, replace
from maxpipe.config.options import update
from maxpipe.model.block import LlamaBlock
from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram
from maxpipe.plan import flops


def make(**values):
    program = ModelProgram(tiny(**values).model)
    return program, canonical_params(program)


def activations(program, params, batch):
    positions, segments = jnp.asarray(batch["positions"]), jnp.asarray(batch["segment_ids"])
    side = SideInputs(positions, segments, jnp.arange(len(batch["tokens"])))
    x = program.embed(params, jnp.asarray(batch["tokens"]))
    for i in range(program.config.num_layers):
        x, _ = program.block(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x, side, None)
    return x


def test_parameter_count_of_a_preset_is_the_published_one():
    counts = {name: ModelProgram(for_slice(name).model).parameter_count() for name in PARAMETERS}
    assert counts == PARAMETERS


def test_parameter_count_equals_the_arrays_and_the_flops_model():
    for tied in (False, True):
        options = {"model.qk_norm": True, "model.attention_bias": True, "model.dropout": 0.1 * tied}
        program, params = make(**options, **{"model.tie_embeddings": tied})
        assert program.needs_key == tied
        assert program.parameter_count() == sum(p.size for p in jax.tree.leaves(params))
        assert program.parameter_count() == flops.parameter_count(program.config)


SEGMENTS = {  # one row of two, tokens 0-3 and 4-7
    "segment_ids": np.array([[1] * 4 + [2] * 4], np.int32),
    "positions": np.array([[0, 1, 2, 3] * 2], np.int32),
}


def test_logits_depend_on_earlier_tokens_of_the_segment_alone():
    program, params = make(**{"model.num_layers": 2})
    params = jax.tree.map(jnp.asarray, params)
    batch = make_batch(1) | SEGMENTS

    @jax.jit
    def logits(tokens):
        x = activations(program, params, batch | {"tokens": tokens})
        return program.logits(params, x)[0]

    for at, expected in ((0, [0, 1, 2, 3]), (2, [2, 3]), (4, [4, 5, 6, 7]), (7, [7])):
        tokens = batch["tokens"].copy()
        tokens[0, at] = (tokens[0, at] + 1) % 64
        changed = (logits(tokens) != logits(batch["tokens"])).any(axis=-1)
        assert np.flatnonzero(changed).tolist() == expected


X = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(np.float32) * 3


def head(**values):
    program, params = make(**values)
    batch = make_batch(3)
    targets, weights = batch["targets"], batch["weights"]
    logits = np.asarray(program.logits(params, jnp.asarray(X)), np.float64)
    losses = program.head_loss(params, *map(jnp.asarray, (X, targets, weights)))
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return *map(float, losses), logits, weights, picked


def test_logits_of_a_model_in_bfloat16_are_float32():
    program, params = make(**{"model.dtype": "bfloat16"})
    x = jnp.ones((1, 2, 16), jnp.bfloat16)
    assert program.logits(program.cast(params), x).dtype == jnp.float32


def test_cross_entropy_is_a_weighted_sum_to_which_z_loss_adds_the_squared_log_partition():
    for z_loss in (0.0, 0.1):
        loss, cross_entropy, logits, weights, picked = head(**{"model.z_loss": z_loss})
        log_z = np.log(np.exp(logits).sum(-1))
        assert cross_entropy == pytest.approx((weights * (log_z - picked)).sum(), rel=1e-5)
        added = z_loss * (weights * log_z**2).sum()
        assert loss - cross_entropy == pytest.approx(added, rel=1e-4)


def test_cast_changes_neither_integers_nor_the_router_of_experts():
    program, params = make(**{"model.dtype": "bfloat16", "model.moe.experts": 2})
    for values, dtype in ((jnp.ones(2), jnp.bfloat16), (jnp.arange(2), jnp.int32)):
        assert program.cast({"embed": {"embedding": values}})["embed"]["embedding"].dtype == dtype
    for layers in (program.cast(params)["layers"], program.cast(params["layers"])):
        assert layers["moe"]["router"].dtype == jnp.float32
        assert layers["moe"]["gate"].dtype == jnp.bfloat16


def test_model_program_with_an_unknown_block_names_the_choices():
    config = update(replace(Config(), **TINY), {"model.block": "lama", "model.head_dim": 4})
    with pytest.raises(ValueError, match=r"choose one of .*llama"):
        ModelProgram(config.model)


def test_auxiliary_loss_without_a_name_gets_one(monkeypatch):
    class OneNumber(LlamaBlock):
        def __call__(self, x, side, key):
            return super().__call__(x, side, key)[0], jnp.float32(2)

    monkeypatch.setitem(catalog.BLOCKS, "one_number", catalog.Block("a test's"))
    monkeypatch.setattr("maxpipe.model.program.implementation", lambda _: OneNumber)
    program, params = make(**{"model.block": "one_number"})
    assert program.auxiliary_names == ("auxiliary_loss",)
    layer = jax.tree.map(lambda p: p[0], params["layers"])
    ids = jnp.zeros((1, 4), jnp.int32)
    x = jnp.zeros((1, 4, program.config.embed_dim))
    _, auxiliary = program.block(layer, x, SideInputs(ids, ids, ids[0]), None)
    assert auxiliary == {"auxiliary_loss": 2}
