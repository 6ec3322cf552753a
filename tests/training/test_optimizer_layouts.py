"""Optimizers do not depend on how layers are stacked: [4], or [2, 2, 1] on two stages."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, make_batch, make_mesh, tiny
from helpers.trainers import assert_same_bits, drawn, placed
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer
from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.model.program import ModelProgram
from maxpipe.training import optimizers
from maxpipe.training.state import map_by_parameter
from maxpipe.training.update import Optimizer, global_norm

LAYOUTS = {
    "one stage": {"pipeline.engine": "sequential"},
    "two stages": {"mesh.ici.stage": 2, "pipeline.num_repeats": 2, "pipeline.schedule": "circular"},
}
ROWS = 4


@cache
def compiled(layout):
    tested = EngineUnderTest(tiny(**LAYOUTS[layout], **{"data.global_batch_size": ROWS}))
    return tested, jax.jit(tested.pipeline.loss_and_gradients)


def trained(layout, name):
    """Return (losses, optimizer state as on disk) after four steps."""
    config = tiny()
    changed = {"name": name, "learning_rate": 1e-3, "schedule": "constant"}
    settings = dataclasses.replace(config.optimizer, **changed)
    optimizer = Optimizer(settings, ModelProgram(config.model).specs)
    tested, gradients_of = compiled(layout)
    update = jax.jit(optimizer.update)
    params, losses = tested.params, []
    opt_state = jax.jit(optimizer.init)(params)
    for step in range(4):
        batch = {name: jnp.asarray(x) for name, x in make_batch(ROWS, seed=step % 3).items()}
        metrics, gradients = gradients_of(params, batch, jax.random.key(0))
        rest = jnp.int32(step), global_norm(gradients), jnp.bool_(True)
        params, opt_state = update(params, gradients, opt_state, *rest)
        losses.append(float(metrics["loss"]))
    is_layer = {n: jax.tree.map(lambda _, n=n: n == "layers", p) for n, p in params.items()}
    to = tested.pipeline.to_canonical
    return losses, map_by_parameter(
        lambda leaf, layer: np.asarray(to(leaf) if layer else leaf), opt_state, is_layer, False
    )


@pytest.fixture(autouse=True, scope="module")
def _factor_small_matrices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "LEAST_FACTORED", 8)
        yield


NAMES = [name for name in OPTIMIZERS if name != "adafactor"]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("adafactor", marks=pytest.mark.slow)])
def test_losses_and_state_do_not_depend_on_the_layout(name):
    (losses, state), (other_losses, other_state) = (trained(layout, name) for layout in LAYOUTS)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(other_state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other_state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.max(np.abs(a - b)) <= 1e-3 * np.max(np.abs(b))


def test_statistics_of_rows_and_columns_lie_with_their_layers_and_round_trip():
    layout = {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "pipeline.num_repeats": 2}
    config = tiny(**layout, **{"optimizer.name": "adafactor"})
    engine = build_trainer(config, make_mesh(config))
    factors = engine.abstract_state().opt_state["layers"]["mlp"]["up"][0]
    rows, columns = factors.v_row, factors.v_col
    assert (rows.shape, rows.sharding.spec) == ((2, 2, 1, 16), P(None, "stage", None, "fsdp"))
    assert (columns.shape, columns.sharding.spec) == ((2, 2, 1, 32), P(None, "stage", None, None))
    canonical = drawn(engine)
    live = engine.from_canonical(placed(engine, canonical))
    assert_same_bits(engine.to_canonical(live), canonical)
    described = jax.tree.leaves(engine.abstract_state())
    for leaf, like in zip(jax.tree.leaves(live), described, strict=True):
        assert leaf.sharding == like.sharding
