"""Selection biases move by the load of experts, equally on every engine; figures of the load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from helpers.trainers import placed, run

from maxpipe.builder import build_trainer
from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.parameters import ParamSpec
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.update import Optimizer, balanced, load_figures, with_excess

ROWS, RATE = 16, 0.125  # a power of 2: sums of updates are exact
EXPERTS = {"model.moe.experts": 6, "model.moe.mlp_dim": 16, "model.moe.router": "sigmoid"}
EXPERTS |= {"model.moe.groups": 3, "model.moe.groups_per_token": 2}
EXPERTS |= {"model.moe.balance_loss": 0.1, "model.moe.bias_rate": RATE, "model.num_layers": 5}
EXPERTS |= {"data.global_batch_size": ROWS, "optimizer.learning_rate": 1e-3}
FIGURES = ("expert_load_max", "expert_load_entropy", "idle_experts")
STAGES = {"mesh.ici.stage": 2, "pipeline.num_repeats": 2, "pipeline.num_microbatches": 4}
# Five chunks' worth of layers in four: a chunk has padding.
UNEVEN = {**STAGES, "pipeline.layers_per_stage": [1, 2, 1, 1]}
ENGINES = {
    "circular": UNEVEN | {"pipeline.schedule": "circular", "mesh.ici.fsdp": 2},
    "lockstep_1f1b": STAGES
    | {"pipeline.schedule": "lockstep_1f1b", "mesh.ici.context": 2}
    | {"pipeline.parallel_layers": 4, "pipeline.outside_layers": "before"},
    "zb_v": UNEVEN
    | {"pipeline.schedule": "zb_v", "pipeline.remat_policy": "minimal"}
    | {"mesh.ici.expert": 2, "model.moe.dispatch": "all_to_all"},
}
SEQUENTIAL = {"pipeline.engine": "sequential", "mesh.ici.tensor": 2, "pipeline.num_microbatches": 2}


def make_trainer(values):
    config = tiny(**EXPERTS | values)
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    return trainer, BatchPlacer(mesh, trainer.batch_spec, ROWS)


@pytest.fixture(scope="module")
def sequential():
    trainer, place = make_trainer(SEQUENTIAL)
    state, before = run(trainer, place, trainer.init(jax.random.key(0)), [0], ROWS)
    first = trainer.to_canonical(state)
    live = trainer.from_canonical(placed(trainer, first))
    state, after = run(trainer, place, live, [1, 2], ROWS)
    return first, trainer.to_canonical(state), before + after


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("zb_v", "lockstep_1f1b")]


@pytest.mark.parametrize("name", ["circular", *SLOW])
def test_biases_and_figures_after_three_steps_are_those_of_one_device(sequential, name):
    first, last, expected_metrics = sequential
    trainer, place = make_trainer(ENGINES[name])
    # Two of the steps continue from the checkpoint of another engine.
    _, metrics = run(trainer, place, trainer.init(jax.random.key(0)), [0], ROWS)
    state, more = run(trainer, place, trainer.from_canonical(placed(trainer, first)), [1, 2], ROWS)
    actual = trainer.to_canonical(state)
    bias = last.params["layers"]["moe"]["bias"]
    assert len(np.unique(bias)) > 4
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(actual.params["layers"]["moe"]["bias"], bias)
    for ours, theirs in zip(metrics + more, expected_metrics, strict=True):
        for key in FIGURES:
            assert theirs[key].shape == (5,)
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-6)
        for key in ("loss", "balance_loss", "grad_norm"):
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5)


def test_bias_falls_where_the_load_is_high_and_keeps_its_mean():
    bias = jnp.asarray([[0.5, -0.5, 0.0, 0.0]])
    excess = jnp.asarray([[3.0, -1.0, -1.0, -1.0]])
    after = balanced(bias, excess, 0.1)
    np.testing.assert_allclose(after - bias, [[-0.15, 0.05, 0.05, 0.05]], atol=1e-7)
    np.testing.assert_array_equal(balanced(bias, jnp.zeros_like(bias), 0.1), bias)


def test_figures_of_an_even_and_an_uneven_layer():
    load = jnp.asarray([[4.0, 4, 4, 4], [8, 8, 0, 0]])
    assert load_figures(load, None).keys() == {*FIGURES}
    figures = load_figures(load, jnp.asarray([0.0, 4]))
    np.testing.assert_allclose(figures["dropped_assignments"], [0, 0.25])
    np.testing.assert_allclose(figures["expert_load_max"], [1, 2])
    np.testing.assert_allclose(figures["expert_load_entropy"], [1, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(figures["idle_experts"], [0, 2])


SPECS = {
    "kernel": ParamSpec((4, 3), jnp.dtype("float32"), ("embed", "mlp"), 1.0),
    "bias": ParamSpec((3,), jnp.dtype("float32"), ("expert_bias",), 0.0),
}


def test_bias_has_no_moments_and_its_load_changes_no_other_parameter():
    for name in OPTIMIZERS:
        rates = {"learning_rate": 0.1, "warmup_steps": 0, "decay_steps": 10}
        config = OptimizerConfig(name=name, **rates, grad_clip_norm=0.5)
        params = {"kernel": jnp.ones((2, 4, 3)), "bias": jnp.full((2, 3), 7.0)}
        gradients = {"kernel": jnp.ones((2, 4, 3)), "bias": jnp.zeros((2, 3))}
        load = jnp.asarray([[5.0, 1, 0], [2, 2, 2]])
        optimizer = Optimizer(config, SPECS, RATE)
        state = optimizer.init(params)
        plain = Optimizer(config, {"kernel": SPECS["kernel"]})
        plain_state = plain.init({"kernel": params["kernel"]})
        shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
        assert shapes == [leaf.shape for leaf in jax.tree.leaves(plain_state)]
        facts = jnp.int32(0), jnp.float32(2.0), jnp.bool_(True)
        loaded = with_excess(SPECS, gradients, load)
        after, _ = optimizer.update(params, loaded, state, *facts)
        kernel = {"kernel": gradients["kernel"]}
        expected, _ = plain.update({"kernel": params["kernel"]}, kernel, plain_state, *facts)
        np.testing.assert_array_equal(after["kernel"], expected["kernel"])
        update = RATE * np.asarray([[-4 / 3, 2 / 3, 2 / 3], [0, 0, 0]])
        np.testing.assert_allclose(after["bias"] - 7, update, atol=1e-6)
        skipped, _ = optimizer.update(params, loaded, state, *facts[:2], jnp.bool_(False))
        np.testing.assert_array_equal(skipped["bias"], params["bias"])
        unchanged, _ = Optimizer(config, SPECS).update(params, loaded, state, *facts)
        np.testing.assert_array_equal(unchanged["bias"], params["bias"])
