"""Optimizers do not depend on how layers are stacked: [4], or [2, 2, 1] on two stages."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, make_batch, make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer
from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.model.program import ModelProgram
from maxpipe.training import optimizers
from maxpipe.training.state import map_by_parameter
from maxpipe.training.update import Optimizer, global_norm

LAYOUTS = {
    "one stage": {"pipeline.engine": "sequential"},
    "two stages": {
        "mesh.ici.stage": 2,
        "pipeline.num_repeats": 2,
        "pipeline.schedule": "circular",
    },
}
ROWS = 4
STEPS = 20


@cache
def compiled(layout):
    """Return (engine with parameters, its jitted loss and gradients), shared by all optimizers."""
    tested = EngineUnderTest(tiny(**LAYOUTS[layout], **{"data.global_batch_size": ROWS}))
    return tested, jax.jit(tested.pipeline.loss_and_gradients)


class Training:
    """Steps with one optimizer; a state is {"params", "opt_state"}."""

    def __init__(self, layout, name):
        config = tiny()
        settings = dataclasses.replace(
            config.optimizer, name=name, learning_rate=1e-3, schedule="constant"
        )
        self.optimizer = Optimizer(settings, ModelProgram(config.model).specs)
        self.tested, self._gradients = compiled(layout)
        self._update = jax.jit(self.optimizer.update)
        self._init = jax.jit(self.optimizer.init)

    def begin(self):
        return {"params": self.tested.params, "opt_state": self._init(self.tested.params)}

    def run(self, state, steps):
        """Return (losses, state after the steps)."""
        params, opt_state = state["params"], state["opt_state"]
        losses = []
        for step in steps:
            batch = {name: jnp.asarray(x) for name, x in make_batch(ROWS, seed=step % 3).items()}
            metrics, gradients = self._gradients(params, batch, jax.random.key(0))
            norm = global_norm(gradients)
            params, opt_state = self._update(
                params, gradients, opt_state, jnp.int32(step), norm, jnp.bool_(True)
            )
            losses.append(float(metrics["loss"]))
        return losses, {"params": params, "opt_state": opt_state}

    def on_disk(self, state):
        is_layer = {
            n: jax.tree.map(lambda _, n=n: n == "layers", p) for n, p in state["params"].items()
        }
        to = self.tested.pipeline.to_canonical
        return map_by_parameter(
            lambda leaf, layer: np.asarray(to(leaf) if layer else leaf), state, is_layer, False
        )


@pytest.fixture(autouse=True, scope="module")
def _factor_small_matrices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "LEAST_FACTORED", 8)
        yield


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "adafactor" else [])
        for name in OPTIMIZERS
    ],
)
def test_losses_and_state_do_not_depend_on_the_layout(name):
    ends = []
    for layout in LAYOUTS:
        training = Training(layout, name)
        losses, state = training.run(training.begin(), range(4))
        ends.append((losses, training.on_disk(state)))
    (losses, state), (other_losses, other_state) = ends
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(other_state)
    for a, b in zip(
        jax.tree.leaves(state["opt_state"]), jax.tree.leaves(other_state["opt_state"]), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.max(np.abs(a - b)) <= 1e-3 * np.max(np.abs(b))


def test_statistics_of_rows_and_columns_lie_with_their_layers_and_round_trip():
    values = {
        "mesh.ici.stage": 2,
        "mesh.ici.fsdp": 2,
        "pipeline.num_repeats": 2,
        "optimizer.name": "adafactor",
    }
    config = tiny(**values)
    engine = build_trainer(config, make_mesh(config))
    rows = engine.abstract_state().opt_state["layers"]["mlp"]["up"][0].v_row
    columns = engine.abstract_state().opt_state["layers"]["mlp"]["up"][0].v_col
    assert (rows.shape, rows.sharding.spec) == ((2, 2, 1, 16), P(None, "stage", None, "fsdp"))
    assert (columns.shape, columns.sharding.spec) == ((2, 2, 1, 32), P(None, "stage", None, None))
    state = jax.tree.map(
        lambda x: jax.device_put(np.arange(x.size).reshape(x.shape).astype(x.dtype), x.sharding),
        engine.abstract_state(),
    )
    saved = engine.to_canonical(state)
    placed = jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding), saved, engine.abstract_canonical()
    )
    again = engine.from_canonical(placed)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
