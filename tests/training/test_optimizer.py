"""Updates against NumPy in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import tiny

from maxpipe.config import OptimizerConfig
from maxpipe.model.parameters import ParamSpec
from maxpipe.model.program import ModelProgram
from maxpipe.training.optimizer import Optimizer, global_norm
from maxpipe.training.optimizers import OPTIMIZERS

CONFIG = OptimizerConfig(
    learning_rate=0.01, schedule="constant", warmup_steps=0, decay_steps=10, beta1=0.8, beta2=0.9, eps=1e-6,
    weight_decay=0.3, grad_clip_norm=0.0,
)  # fmt: skip
SPECS = {
    "kernel": ParamSpec((3, 4), jnp.dtype("float32"), ("embed", "mlp"), 1.0),
    "bias": ParamSpec((2, 2), jnp.dtype("float32"), ("heads", "head_dim"), 1.0),
    "scale": ParamSpec((3,), jnp.dtype("float32"), ("norm",), 0.0, 1.0),
}
DECAYING = {"kernel"}


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in SPECS.items()}


def run(config, num_steps, *, finite=True, gradients=values):
    """(parameters, optimizer state) after updates with gradients(1), gradients(2), ..."""
    optimizer = Optimizer(config, SPECS)
    params = jax.tree.map(jnp.asarray, values(0))
    state = optimizer.init(params)
    for step in range(num_steps):
        g = jax.tree.map(jnp.asarray, gradients(step + 1))
        norm = global_norm(g)
        params, state = optimizer.update(params, g, state, jnp.int32(step), norm, jnp.bool_(finite))
    return params, state


def assert_close(actual, expected):
    for name in SPECS:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-5, atol=1e-6)


def adamw_by_hand(num_steps, scale=lambda gradients: 1.0):
    p = {name: v.astype(np.float64) for name, v in values(0).items()}
    m = {name: np.zeros_like(v) for name, v in p.items()}
    v = {name: np.zeros_like(x) for name, x in p.items()}
    for t in range(1, num_steps + 1):
        gradients = values(t)
        for name in p:
            g = gradients[name].astype(np.float64) * scale(gradients)
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            direction = m[name] / (1 - 0.8**t) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-6)
            decay = 0.3 if name in DECAYING else 0.0
            p[name] = p[name] - 0.01 * (direction + decay * p[name])
    return p


def test_all_are_tested():
    assert OPTIMIZERS.names() == ["adamw", "sgd"]


def test_adamw():
    assert_close(run(CONFIG, 4)[0], adamw_by_hand(4))


def test_clipping_scales_all_gradients_to_the_global_norm():
    def scale(gradients):
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        assert norm > 0.5
        return 0.5 / (norm + 1e-6)

    clipped = dataclasses.replace(CONFIG, grad_clip_norm=0.5)
    assert_close(run(clipped, 3)[0], adamw_by_hand(3, scale))


def test_small_gradients_are_not_clipped():
    clipped = dataclasses.replace(CONFIG, grad_clip_norm=1e3)
    assert_close(run(clipped, 2)[0], adamw_by_hand(2))


def test_clipping_counts_the_norm_of_the_whole_model_not_of_the_part():
    """An engine that updates stage by stage hands over the global norm."""
    plain = dataclasses.replace(CONFIG, name="sgd", beta1=0.0, weight_decay=0.0, grad_clip_norm=1.0)
    optimizer = Optimizer(plain, SPECS)
    params, gradients = values(0), values(1)
    state = optimizer.init(params)
    part, _ = optimizer.update(params, gradients, state, jnp.int32(0), jnp.float32(100), jnp.bool_(True))
    expected = {name: params[name] - 0.01 * gradients[name] / 100 for name in params}
    assert_close(part, expected)


@pytest.mark.parametrize("beta1", [0.0, 0.8])
def test_sgd(beta1):
    p = {name: v.astype(np.float64) for name, v in values(0).items()}
    trace = dict.fromkeys(p, 0.0)
    for t in (1, 2, 3):
        for name in p:
            trace[name] = values(t)[name] + beta1 * trace[name]
            decay = 0.3 if name in DECAYING else 0.0
            p[name] = p[name] - 0.01 * (trace[name] + decay * p[name])
    actual, state = run(dataclasses.replace(CONFIG, name="sgd", beta1=beta1), 3)
    assert_close(actual, p)
    assert bool(jax.tree.leaves(state)) == (beta1 > 0)


def test_norms_and_biases_do_not_decay_in_a_real_model():
    """Also biases with two dimensions, which a rule by rank would take for matrices."""
    model = {"model.qk_norm": True, "model.attention_bias": True}
    specs = ModelProgram(tiny(**model).model).specs
    config = dataclasses.replace(CONFIG, weight_decay=1.0, learning_rate=0.5)
    optimizer = Optimizer(config, specs)
    is_spec = {"is_leaf": lambda x: isinstance(x, ParamSpec)}
    ones = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs, **is_spec)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    update = jax.jit(optimizer.update)
    state = jax.jit(optimizer.init)(ones)
    updated, _ = update(ones, zeros, state, jnp.int32(0), jnp.float32(0), jnp.bool_(True))
    decayed, kept = set(), set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(updated):
        (kept if (leaf == 1).all() else decayed).add(jax.tree_util.keystr(path, simple=True, separator="."))
    attention, mlp = "layers.attention.", "layers.mlp."
    assert decayed == {
        "embed.embedding",
        "head.kernel",
        *(attention + name for name in ("query", "key", "value", "out")),
        *(mlp + name for name in ("gate", "up", "down")),
    }
    assert {attention + "query_bias", attention + "query_norm.scale", "head.norm.scale"} <= kept


@pytest.mark.parametrize("name", OPTIMIZERS.names())
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_no_bit(name, bad):
    config = dataclasses.replace(CONFIG, name=name, grad_clip_norm=1.0)
    optimizer = Optimizer(config, SPECS)
    params, state = run(config, 2)
    gradients = {key: jnp.full(spec.shape, bad) for key, spec in SPECS.items()}
    update = jax.jit(optimizer.update)
    after = update(params, gradients, state, jnp.int32(2), global_norm(gradients), jnp.bool_(False))
    for old, new in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_state_is_float32_for_bfloat16_parameters_before_and_after_an_update(name):
    optimizer = Optimizer(dataclasses.replace(CONFIG, name=name), {"kernel": SPECS["kernel"]})
    params = {"kernel": jnp.ones((3, 4), jnp.bfloat16)}
    gradients = {"kernel": jnp.full((3, 4), 1e-3, jnp.bfloat16)}
    before = optimizer.init(params)
    params, after = optimizer.update(
        params, gradients, before, jnp.int32(0), jnp.float32(1), jnp.bool_(True)
    )
    assert params["kernel"].dtype == jnp.bfloat16
    for state in (before, after):
        assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype("float32")}


def test_global_norm():
    assert float(global_norm({"a": jnp.array([3.0]), "b": {"c": jnp.array([[4.0]], jnp.bfloat16)}})) == 5
