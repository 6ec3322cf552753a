"""Logits of every model type equal those of transformers, which are recorded in tests/golden/hf."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_models import CASES, LENGTH, NUM_GENERATED, POSITIONS, recorded
from helpers.hf_parameters import config_of, family_of, logits_of, parameters_of, text_of

from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.generate.decoding import Decoder
from maxpipe.hf.tensors import tensor_names, tensor_rules
from maxpipe.model.program import ModelProgram

TOLERANCE = 2e-5  # of the largest logit
BFLOAT16_RATIO = 1.25  # of errors of bfloat16: ours to those of transformers


logits_in_float32 = cache(lambda name: logits_of(name, config_of(name).model))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    golden = recorded(name)
    logits = logits_in_float32(name)
    tolerance = TOLERANCE * golden["largest"]
    difference = logits[list(POSITIONS)] - np.asarray(golden["logits"])
    assert np.abs(difference).max() <= tolerance
    # The tokens that transformers wrote are the most likely ones.
    written = logits[LENGTH - 1 : -1]
    assert written.argmax(-1).tolist() == golden["generated"]
    assert np.abs(written.max(-1) - np.asarray(golden["generated_logits"])).max() <= tolerance


# One case of each type
@pytest.mark.parametrize("name", {CASES[name][0]: name for name in reversed(CASES)}.values())
def test_bfloat16_is_as_exact_as_in_transformers(name):
    exact = logits_in_float32(name)
    model = dataclasses.replace(config_of(name).model, dtype="bfloat16")
    error = np.sqrt(np.mean((logits_of(name, model) - exact) ** 2) / np.mean(exact**2))
    assert 1e-3 < error <= BFLOAT16_RATIO * recorded(name)["bfloat16_error"]


# Windows in all layers, in some, with two rotations, layers without one, scaled residuals, and
# experts, also with biases, windows and sinks
@pytest.mark.parametrize(
    "name",
    ["mistral", "gemma3", "olmo3", "smollm3", "granite", "qwen3_moe", "gpt_oss", "deepseek_v3"],
)
def test_cached_decoding_writes_what_transformers_wrote(name):
    """The text is 13 times as long as the windows; the cache holds all of it."""
    golden, config = recorded(name), config_of(name)
    decoder = Decoder(config.model, config.data.sequence_length)

    @jax.jit
    def write(params, prompt):
        def step(carry, position):
            logits, cache = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return decoder.step(params, token, position, cache), (token, logits.max(-1))

        positions = LENGTH + jnp.arange(NUM_GENERATED)
        return jax.lax.scan(step, decoder.prefill(params, prompt, LENGTH), positions)[1]

    params = parameters_of(name, config.model)
    generated, logits = write(params, text_of(name)[:, :LENGTH])
    assert generated[:, 0].tolist() == golden["generated"]
    difference = np.asarray(logits[:, 0]) - np.asarray(golden["generated_logits"])
    assert np.abs(difference).max() <= TOLERANCE * golden["largest"]


def test_rules_name_every_tensor_of_transformers_with_its_shape():
    for name in CASES:
        program = ModelProgram(config_of(name).model)
        names = tensor_names(tensor_rules(family_of(name), program), program.config.stacked_layers)
        assert names == {n: tuple(shape) for n, shape in recorded(name)["shapes"].items()}, name


def test_every_model_type_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(MODEL_TYPES)
