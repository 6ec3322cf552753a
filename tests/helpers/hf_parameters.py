"""The tiny models of `helpers.hf_models` as models of maxpipe."""

from collections.abc import Mapping
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from helpers.hf_models import CASES, LENGTH, NUM_GENERATED, recorded, tokens, weights
from maxpipe.config import Config, ModelConfig, replace, resolve
from maxpipe.config.catalog import MODEL_TYPES, RematPolicy
from maxpipe.config.imports import implementation
from maxpipe.hf.family import Family
from maxpipe.hf.tensors import tensor_rules
from maxpipe.model.layers import SideInputs
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import apply_first_layers, apply_layers, layer_function


def family_of(name: str) -> Family:
    return implementation(MODEL_TYPES[CASES[name][0]])()


@cache
def config_of(name: str) -> Config:
    return config_from(name, recorded(name)["config"], LENGTH + NUM_GENERATED)


def config_from(
    name: str, content: Mapping[str, object], length: int = LENGTH, **model: object
) -> Config:
    """Return a configuration with the model of a config.json, of which options may be replaced."""
    values = family_of(name).model(content) | model
    values = {f"model.{key}": value for key, value in values.items()}
    return resolve(replace(Config(), **values, **{"data.sequence_length": length}), 1)


def parameters_of(name: str, model: ModelConfig) -> Params:
    """Return NumPy parameters, from a case's weights by their names in files."""
    tensors = weights(recorded(name)["shapes"], is_gemma=CASES[name][0].startswith("gemma"))
    params: Params = {}
    for rule in tensor_rules(family_of(name), ModelProgram(model)):
        layers = range(model.stacked_layers) if rule.is_layer else (0,)
        of_layers = [[rule.to_parameter(tensors[t]) for t, _ in rule.tensors(i)] for i in layers]
        parts = [np.stack(experts) if rule.experts else experts[0] for experts in of_layers]
        branch = params
        for key in rule.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[rule.path[-1]] = np.stack(parts) if rule.is_layer else parts[0]
    return params


def text_of(name: str) -> np.ndarray:
    generated = np.asarray([recorded(name)["generated"]], np.int32)
    return np.concatenate([tokens(), generated], axis=1)


def last_layer_output(program: ModelProgram, params: Params, text: jax.Array) -> jax.Array:
    rows, length = text.shape
    positions = jnp.broadcast_to(jnp.arange(length), text.shape)
    side = SideInputs(positions, jnp.ones_like(text), jnp.arange(rows))
    layer = layer_function(program, lambda p: p, padded=False)
    index = jnp.arange(program.config.stacked_layers)
    x, first = program.embed(params, text), params["embed"].get("first", {})
    x = apply_first_layers(program, first, lambda p: p, RematPolicy(), x, side, None)
    x, _ = apply_layers(layer, params["layers"], index, x, side, None, scan=True)
    return x


def logits_of(name: str, model: ModelConfig) -> np.ndarray:
    """Return logits of all positions of `text_of`, float32 [tokens, V]."""
    program = ModelProgram(model)

    @jax.jit
    def forward(params: Params, text: jax.Array) -> jax.Array:
        return program.logits(params, last_layer_output(program, params, text))

    params = program.cast(parameters_of(name, model))
    return np.asarray(forward(params, text_of(name)))[0]


def gradients_of(
    name: str, inputs: np.ndarray, targets: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Return a mean cross-entropy and its gradients by the names of tensors in files."""
    model = config_of(name).model
    program = ModelProgram(model)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params: Params) -> jax.Array:
        x = last_layer_output(program, params, jnp.asarray(inputs))
        weights = jnp.full(targets.shape, 1 / targets.size)
        return program.head_loss(params, x, jnp.asarray(targets), weights)[0]

    loss, gradients = loss_and_gradients(parameters_of(name, model))
    tensors = {}
    for rule in tensor_rules(family_of(name), program):
        leaf = gradients
        for key in rule.path:
            leaf = leaf[key]
        for layer in range(model.stacked_layers if rule.is_layer else 1):
            value = np.asarray(leaf[layer] if rule.is_layer else leaf)
            for tensor, index in rule.tensors(layer):
                tensors[tensor] = rule.to_tensor(value[index])
    return float(loss), tensors
