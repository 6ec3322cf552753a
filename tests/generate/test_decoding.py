"""Decoding, compared with the training forward, which sees all tokens at once, and sampling."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import LATENT, canonical_params, tiny

from maxpipe.config.catalog import BLOCKS
from maxpipe.generate.decoding import Decoder, Sampling, _programs, generate
from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram

ALL_OPTIONS = {
    "model.qk_norm": True,
    "model.attention_bias": True,
    "model.tie_embeddings": True,
    "model.logit_soft_cap": 3.0,
}
# Windows and rotations by layer
LAYERS_THAT_DIFFER = {
    "model.layer_pattern": ["local", "global_nope", "local"],
    "model.attention_window": 3,
    "model.rope_theta_local": 100.0,
    "model.attention_sinks": True,
    "model.attention_soft_cap": 5.0,
    "model.query_scale": 0.3,
    "model.embed_scale": 2.0,
}
LATENT_WITH_WINDOWS = LATENT | {
    "model.attention_window": 3,
    "model.layer_pattern": ["local", "global"],
}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 8)).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def forward(config, params, tokens):
    program = ModelProgram(config)
    side = SideInputs(
        positions=jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        segment_ids=jnp.ones_like(tokens),
        sequence_index=jnp.arange(len(tokens)),
    )
    x = program.embed(params, tokens)
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
        x, _ = program.block(layer, x, side._replace(layer_index=jnp.int32(i)), None)
    return program.logits(params, x)


class Case:
    def __init__(self, window=8, **values):
        self.config = tiny(**values).model
        self.params = canonical_params(ModelProgram(self.config))
        decoder = Decoder(self.config, window)
        self.prefill, self.step = jax.jit(decoder.prefill), jax.jit(decoder.step)

    def logits(self, tokens, prompt):
        found, cache = self.prefill(self.params, tokens[:, :prompt], prompt)
        all_found = [found]
        for position in range(prompt, tokens.shape[1]):
            found, cache = self.step(self.params, tokens[:, position], jnp.int32(position), cache)
            all_found.append(found)
        return np.stack(all_found, axis=1)


@pytest.mark.parametrize(
    "values",
    [{"model.block": name} for name in BLOCKS]
    + [ALL_OPTIONS, LAYERS_THAT_DIFFER, LATENT_WITH_WINDOWS],
    ids=str,
)
def test_decoder_logits_equal_training_forward(values):
    case = Case(**values)
    expected = np.asarray(forward(case.config, case.params, jnp.asarray(TOKENS)))
    np.testing.assert_allclose(case.logits(TOKENS, 3), expected[:, 2:], atol=2e-4, rtol=1e-4)


EXPERTS_WITH_WINDOWS = LAYERS_THAT_DIFFER | {"model.moe.experts": 4, "model.moe.per_token": 2}


@pytest.mark.parametrize(
    ("values", "padded"),
    [(ALL_OPTIONS, 6), (LATENT_WITH_WINDOWS, 4), (EXPERTS_WITH_WINDOWS, 5)],
    ids=["plain", "latent", "experts"],
)
def test_padding_after_the_prompt_changes_nothing(values, padded):
    case = Case(window=6, **values)
    expected, cache = case.prefill(case.params, TOKENS[:, :3], 3)
    filler = np.full((2, padded - 3), 63, np.int32)
    tokens = np.concatenate([TOKENS[:, :3], filler], axis=1)
    found, padded_cache = case.prefill(case.params, tokens, 3)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    for position in range(3, 8):
        read = TOKENS[:, position], jnp.int32(position)
        expected, cache = case.step(case.params, *read, cache)
        found, padded_cache = case.step(case.params, *read, padded_cache)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_prompts_of_similar_lengths_share_a_program():
    values = {"data.sequence_length": 12, "model.num_layers": 1}
    config = tiny(**values)
    params = canonical_params(ModelProgram(config.model))
    sampling = Sampling(temperature=0)
    first, _ = _programs(config.model, 12, sampling)
    best = jnp.argmax(forward(config.model, params, jnp.arange(12)[None]), axis=-1)[0]
    for length in range(1, 13):
        (token,) = generate(config, params, [*range(length)], sampling, seed=0, max_tokens=1)
        assert token == int(best[length - 1])
    assert first._cache_size() == 5  # of 1, 2, 4, 8 and 12 tokens


def test_decoder_token_sees_window_only():
    """One layer reads nothing outside the window, and rotary positions are relative."""
    case = Case(window=4, **{"model.num_layers": 1})
    for last in (4, 6, 7):
        seen = jnp.asarray(TOKENS[:, last - 3 : last + 1])
        expected = forward(case.config, case.params, seen)[:, -1]
        actual = case.logits(TOKENS[:, : last + 1], 3)[:, -1]
        np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=1e-4)


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
DRAWS = 4000


def drawn(sampling):
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES), (DRAWS, 5)) + 7
    tokens = jax.jit(sampling)(logits, jax.random.key(0))
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=5) / DRAWS


def renormalised(kept, power=1.0):
    weights = np.where(np.isin(np.arange(5), kept), PROBABILITIES**power, 0)
    return weights / weights.sum()


def test_sampling_draws_tokens_with_their_probability():
    for sampling, expected in [
        (Sampling(), PROBABILITIES),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
        (Sampling(temperature=0.5), renormalised(range(5), 2)),
        (Sampling(top_k=2), renormalised([1, 3])),
        (Sampling(top_k=9), PROBABILITIES),
        (Sampling(top_p=0.69), renormalised([1, 3])),
        (Sampling(top_p=0.71), renormalised([1, 3, 4])),
        (Sampling(top_p=1e-6), [0, 1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.8), renormalised([1, 3])),
    ]:
        shares = drawn(sampling)
        np.testing.assert_allclose(shares, expected, atol=0.03, err_msg=str(sampling))
        assert (shares[np.asarray(expected) == 0] == 0).all(), sampling


def test_sampling_at_a_temperature_near_zero_takes_the_most_likely_token():
    for temperature in [1e-300, 1e-37]:
        logits = jnp.array([[-3.0, 0.0, 5.0, 7.0, -jnp.inf], [-9.0, -2.0, -4.0, -5.0, -jnp.inf]])
        tokens = jax.jit(Sampling(temperature, top_k=4, top_p=0.9))(logits, jax.random.key(0))
        assert tokens.tolist() == [3, 1]
