"""Updates of all optimizers against NumPy in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny
from helpers.trainers import assert_same_bits

from maxpipe.config import OptimizerConfig
from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.model.parameters import ParamSpec
from maxpipe.model.program import ModelProgram
from maxpipe.training import optimizers
from maxpipe.training.update import Optimizer, global_norm

RATES = {"learning_rate": 0.01, "schedule": "constant", "warmup_steps": 0, "decay_steps": 10}
MOMENTS = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
CONFIG = OptimizerConfig(**RATES, **MOMENTS, weight_decay=0.3, grad_clip_norm=0.0)
IS_SPEC = {"is_leaf": lambda x: isinstance(x, ParamSpec)}


def spec_of(shape, axes):
    return ParamSpec(shape, jnp.dtype("float32"), axes, 1.0)


SPECS = {
    "kernel": spec_of((3, 4), ("embed", "mlp")),
    "bias": spec_of((2, 2), ("heads", "head_dim")),
    "scale": spec_of((3,), ("norm",)),
}


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(s.shape).astype(np.float32) for name, s in SPECS.items()}


def run(config, num_steps):
    optimizer = Optimizer(config, SPECS)
    params = jax.tree.map(jnp.asarray, values(0))
    state = optimizer.init(params)
    for step in range(num_steps):
        g = jax.tree.map(jnp.asarray, values(step + 1))
        rest = jnp.int32(step), global_norm(g), jnp.bool_(True)
        params, state = optimizer.update(params, g, state, *rest)
    return params, state


def test_frozen_parameter_keeps_its_bits_and_has_no_state():
    specs = SPECS | {"kernel": dataclasses.replace(SPECS["kernel"], frozen=True)}
    optimizer = Optimizer(CONFIG, specs)
    params = jax.tree.map(jnp.asarray, values(0))
    state = optimizer.init(params)
    # One count, and two moments of each of the other two.
    assert len(jax.tree.leaves(state)) == 1 + 2 * 2
    gradients = jax.tree.map(jnp.asarray, values(1)) | {"kernel": None}
    norm = global_norm(gradients)
    after, _ = optimizer.update(params, gradients, state, jnp.int32(0), norm, jnp.bool_(True))
    assert_same_bits(after["kernel"], params["kernel"])
    assert not np.array_equal(after["bias"], params["bias"])


def assert_close(actual, expected):
    for name in SPECS:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-5, atol=1e-6)


def by_hand(direction, num_steps=3):
    p = {name: v.astype(np.float64) for name, v in values(0).items()}
    for t in range(1, num_steps + 1):
        gradients = {name: g.astype(np.float64) for name, g in values(t).items()}
        for name in p:
            decay = 0.3 if name == "kernel" else 0.0
            p[name] = p[name] - 0.01 * (direction(t, name, p[name], gradients) + decay * p[name])
    return p


def adamw_by_hand(num_steps, scale=lambda gradients: 1.0):
    m, v = dict.fromkeys(SPECS, 0.0), dict.fromkeys(SPECS, 0.0)

    def direction(t, name, p, gradients):
        g = gradients[name] * scale(gradients)
        m[name] = 0.8 * m[name] + 0.2 * g
        v[name] = 0.9 * v[name] + 0.1 * g**2
        return m[name] / (1 - 0.8**t) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-6)

    return by_hand(direction, num_steps)


def test_learning_rate_of_zero_leaves_every_bit():
    """A direction below 0 times a rate of 0 is -0.0, which makes 0.0 of a parameter of -0.0."""
    for name in OPTIMIZERS:
        config = dataclasses.replace(CONFIG, name=name, learning_rate=0.0, weight_decay=0.0)
        optimizer = Optimizer(config, SPECS)
        params = {key: jnp.asarray(x).at[..., 0].set(-0.0) for key, x in values(0).items()}
        state = optimizer.init(params)
        gradients = jax.tree.map(lambda x: -jnp.ones_like(x), params)
        rest = jnp.int32(0), global_norm(gradients), jnp.bool_(True)
        after, _ = jax.jit(optimizer.update)(params, gradients, state, *rest)
        assert_same_bits(after, params)


def test_adamw_equals_numpy_with_gradients_clipped_to_the_global_norm():
    def scale(gradients):
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
        assert norm > 0.5
        return 0.5 / (norm + 1e-6)

    clipped = dataclasses.replace(CONFIG, grad_clip_norm=0.5)
    assert_close(run(clipped, 3)[0], adamw_by_hand(3, scale))
    for limit in (0, 1e3):  # none, and one that is not reached
        config = dataclasses.replace(CONFIG, grad_clip_norm=limit)
        assert_close(run(config, 4)[0], adamw_by_hand(4))


def test_clipping_of_a_part_goes_by_the_norm_of_the_model():
    """A trainer that updates stage by stage passes the global norm."""
    plain = dataclasses.replace(CONFIG, name="sgd", beta1=0.0, weight_decay=0.0, grad_clip_norm=1.0)
    optimizer = Optimizer(plain, SPECS)
    params, gradients = values(0), values(1)
    state = optimizer.init(params)
    rest = jnp.int32(0), jnp.float32(100), jnp.bool_(True)
    part, _ = optimizer.update(params, gradients, state, *rest)
    expected = {name: params[name] - 0.01 * gradients[name] / 100 for name in params}
    assert_close(part, expected)


@pytest.mark.parametrize("beta1", [0.0, 0.8])
def test_sgd_equals_numpy(beta1):
    trace = dict.fromkeys(SPECS, 0.0)

    def direction(t, name, p, gradients):
        trace[name] = gradients[name] + beta1 * trace[name]
        return trace[name]

    actual, state = run(dataclasses.replace(CONFIG, name="sgd", beta1=beta1), 3)
    assert_close(actual, by_hand(direction))
    assert bool(jax.tree.leaves(state)) == (beta1 > 0)


def test_lion_equals_numpy():
    m = dict.fromkeys(SPECS, 0.0)

    def direction(t, name, p, gradients):
        sign = np.sign(0.8 * m[name] + 0.2 * gradients[name])
        m[name] = 0.9 * m[name] + 0.1 * gradients[name]
        return sign

    assert_close(run(dataclasses.replace(CONFIG, name="lion"), 3)[0], by_hand(direction))


def test_adafactor_equals_numpy(monkeypatch):
    """The matrix keeps means of rows and of columns, the others all their second moments."""
    monkeypatch.setattr(optimizers, "LEAST_FACTORED", 3)
    means = dict.fromkeys((*SPECS, "rows", "columns"), 0.0)

    def direction(t, name, p, gradients):
        squares = {name: gradients[name] ** 2}
        if name == "kernel":
            squares = {"rows": squares[name].mean(1), "columns": squares[name].mean(0)}
        for key, square in squares.items():
            means[key] = (1 - t**-0.8) * means[key] + t**-0.8 * square
        moment = means[name]
        if name == "kernel":
            moment = np.outer(means["rows"], means["columns"]) / means["rows"].mean()
        u = gradients[name] / np.sqrt(moment)
        return u / max(1, np.sqrt((u**2).mean())) * np.sqrt((p**2).mean())

    assert_close(run(dataclasses.replace(CONFIG, name="adafactor"), 3)[0], by_hand(direction))


class TestMuon:
    CONFIG = dataclasses.replace(CONFIG, name="muon", weight_decay=0.0)

    def direction(self, spec, gradient):
        optimizer = Optimizer(self.CONFIG, {"w": spec})
        params = {"w": jnp.ones(gradient.shape)}
        args = jnp.int32(0), jnp.float32(1), jnp.bool_(True)
        gradients, state = {"w": jnp.asarray(gradient)}, optimizer.init(params)
        updated, _ = optimizer.update(params, gradients, state, *args)
        return (1 - np.asarray(updated["w"], np.float64)) / 0.01

    def test_direction_has_the_singular_vectors_and_about_equal_singular_values(self):
        for shape, axes, matrix in [
            ((8, 32), ("embed", "mlp"), (8, 32)),
            ((32, 8), ("mlp", "embed"), (32, 8)),
            ((8, 4, 3), ("embed", "heads", "head_dim"), (8, 12)),
            ((4, 3, 8), ("heads", "head_dim", "embed"), (12, 8)),
        ]:
            gradient = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            direction = self.direction(spec_of(shape, axes), gradient).reshape(matrix)
            exact = gradient.reshape(matrix).astype(np.float64)
            u, _, v = np.linalg.svd(exact, full_matrices=False)
            inside = u.T @ direction @ v.T / (0.2 * math.sqrt(max(matrix)))
            assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-2
            assert ((np.diag(inside) > 0.6) & (np.diag(inside) < 1.3)).all()
            assert np.sqrt((direction**2).mean()) == pytest.approx(0.2, abs=0.05)

    def test_each_expert_is_a_matrix_of_its_own(self):
        gradient = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
        spec = spec_of((2, 8, 16), ("expert", "expert_embed", "expert_mlp"))
        one = spec_of((8, 16), ("embed", "mlp"))
        alone = np.stack([self.direction(one, expert) for expert in gradient])
        np.testing.assert_allclose(self.direction(spec, gradient), alone, atol=1e-4)

    def test_parameters_that_are_no_matrices_get_adamw(self):
        outer = ("vocab", "outer_embed"), ("outer_embed", "vocab")
        for axes in (*outer, ("heads", "head_dim"), ("norm",), ("embed", "expert")):
            spec = spec_of((4, 3)[: len(axes)], axes)
            gradient = np.random.default_rng(0).standard_normal(spec.shape).astype(np.float32)
            # AdamW's first step goes by the sign alone.
            np.testing.assert_allclose(self.direction(spec, gradient), np.sign(gradient), atol=1e-4)

    def test_first_dense_layers_have_the_matrices_of_a_dense_model(self):
        for model in [
            {"model.attention_bias": True, "model.mlp_bias": True, "model.qk_norm": True},
            {"model.attention_kind": "mla", "model.num_kv_heads": 4, "model.mla.q_lora_rank": 8},
            {"model.lora.rank": 2},
        ]:
            dense = ModelProgram(tiny(**model).model).specs["layers"]
            experts = {"model.moe.experts": 4, "model.first_dense_layers": 1, "model.num_layers": 5}
            first = ModelProgram(tiny(**model, **experts).model).specs["embed"]["first"]["0"]

            found, expected = (
                jax.tree.map(lambda spec: [optimizers.matrix_sides(spec)], specs, **IS_SPEC)
                for specs in (first, dense)
            )
            assert found == expected
            assert any(leaf is not None for leaf in jax.tree.leaves(found))


def test_norms_and_biases_of_a_model_do_not_decay():
    """Also biases with two dimensions, which a rule by rank would take for matrices."""
    model = {"model.qk_norm": True, "model.attention_bias": True, "model.moe.experts": 4}
    specs = ModelProgram(tiny(**model).model).specs
    config = dataclasses.replace(CONFIG, weight_decay=1.0, learning_rate=0.5)
    optimizer = Optimizer(config, specs)
    ones = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs, **IS_SPEC)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    update = jax.jit(optimizer.update)
    state = jax.jit(optimizer.init)(ones)
    updated, _ = update(ones, zeros, state, jnp.int32(0), jnp.float32(0), jnp.bool_(True))
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree.leaves_with_path(updated)
        if not (leaf == 1).all()
    }
    attention, moe = "layers.attention.", "layers.moe."
    assert decayed == {
        "embed.embedding",
        "head.kernel",
        *(attention + name for name in ("query", "key", "value", "out")),
        *(moe + name for name in ("gate", "up", "down", "router")),
    }


def test_update_that_is_not_accepted_changes_no_bit():
    for name in OPTIMIZERS:
        config = dataclasses.replace(CONFIG, name=name, grad_clip_norm=1.0)
        before = run(config, 1)
        update = jax.jit(Optimizer(config, SPECS).update)
        for bad in (np.nan, np.inf):
            gradients = {key: jnp.full(spec.shape, bad) for key, spec in SPECS.items()}
            params, state = before
            rest = jnp.int32(1), global_norm(gradients), jnp.bool_(False)
            assert_same_bits(update(params, gradients, state, *rest), before)


def test_state_of_bfloat16_parameters_is_float32():
    for name in OPTIMIZERS:
        optimizer = Optimizer(dataclasses.replace(CONFIG, name=name), {"kernel": SPECS["kernel"]})
        params = {"kernel": jnp.ones((3, 4), jnp.bfloat16)}
        gradients = {"kernel": jnp.full((3, 4), 1e-3, jnp.bfloat16)}
        before = optimizer.init(params)
        rest = jnp.int32(0), jnp.float32(1), jnp.bool_(True)
        params, after = optimizer.update(params, gradients, before, *rest)
        assert params["kernel"].dtype == jnp.bfloat16
        dtypes = {leaf.dtype for leaf in jax.tree.leaves((before, after)) if leaf.ndim}
        assert dtypes == {jnp.dtype("float32")}
