"""Logits of every model type equal those of transformers, which are recorded in tests/golden/hf."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_models import CASES, LENGTH, POSITIONS, recorded, tokens, weights

from maxpipe.config import Config, replace, resolve
from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.config.imports import implementation
from maxpipe.hf.tensors import tensor_names, tensor_rules
from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import apply_layers, layer_function

TOLERANCE = 2e-5  # of the largest logit


def family_of(name):
    return implementation(MODEL_TYPES[CASES[name][0]])()


@cache
def model_of(name):
    """Return the model section that config.json of a case means, resolved for its sequences."""
    values = family_of(name).model(recorded(name)["config"])
    values = {f"model.{key}": value for key, value in values.items()}
    return resolve(replace(Config(), **values, **{"data.sequence_length": LENGTH}), 1).model


def logits_of(name, model=None):
    """Return logits of all positions, from weights by their names in the files."""
    program = ModelProgram(model or model_of(name))
    is_gemma = CASES[name][0].startswith("gemma")
    rules = tensor_rules(family_of(name), program)
    tensors = weights(recorded(name)["shapes"], is_gemma=is_gemma)
    params = {}
    for rule in rules:
        layers = range(program.config.num_layers) if rule.is_layer else (None,)
        parts = [rule.to_parameter(tensors[rule.template.format(layer=i)]) for i in layers]
        branch = params
        for key in rule.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[rule.path[-1]] = np.stack(parts) if rule.is_layer else parts[0]

    @jax.jit
    def forward(params, tokens):
        side = SideInputs(jnp.arange(LENGTH)[None], jnp.ones_like(tokens), jnp.zeros(1, jnp.int32))
        layer = layer_function(program, lambda p: p, padded=False)
        index = jnp.arange(program.config.num_layers)
        x = program.embed(params, tokens)
        x, _ = apply_layers(layer, params["layers"], index, x, side, None, scan=True)
        return program.logits(params, x)

    return np.asarray(forward(params, tokens()))[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    golden = recorded(name)
    difference = np.abs(logits_of(name)[list(POSITIONS)] - np.asarray(golden["logits"]))
    assert difference.max() <= TOLERANCE * golden["largest"]


@pytest.mark.parametrize("name", CASES)
def test_rules_name_every_tensor_of_transformers_with_its_shape(name):
    program = ModelProgram(model_of(name))
    names = tensor_names(tensor_rules(family_of(name), program), program.config.num_layers)
    assert names == {n: tuple(shape) for n, shape in recorded(name)["shapes"].items()}


def test_every_model_type_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"attention_window": 9}),
        ("gemma2", {"query_scale": 0.25}),
        ("smollm3", {"layer_pattern": []}),
        ("gemma3", {"rope_theta_local": 0.0}),
    ],
)
def test_logits_notice_a_single_wrong_option(name, change):
    """Each of these is within what an untrained model would not show in its loss."""
    golden = recorded(name)
    logits = logits_of(name, dataclasses.replace(model_of(name), **change))
    difference = np.abs(logits[list(POSITIONS)] - np.asarray(golden["logits"]))
    assert difference.max() > 100 * TOLERANCE * golden["largest"]
