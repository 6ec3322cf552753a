"""What trainers of every engine do alike: steps, steps that change nothing, and checkpoints."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers.engines import make_batch, make_mesh, tiny
from helpers.trainers import assert_same_bits, placed, run

from maxpipe.builder import build_trainer
from maxpipe.training.batches import BatchPlacer

ROWS = 16
MPMD = {"pipeline.schedule": "1f1b", "pipeline.layers_per_stage": [3, 1]}
ENGINES = {
    "sequential": {"pipeline.engine": "sequential"},
    "circular": {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "pipeline.num_repeats": 2},
    "scheduled": {"mesh.ici.stage": 2, "pipeline.schedule": "lockstep_1f1b"},
    "mpmd": MPMD | {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "pipeline.num_microbatches": 4},
}


@cache
def made(engine):
    skips = {"optimizer.max_consecutive_skips": 5, "optimizer.spike_window": 16}
    common = {"optimizer.learning_rate": 1e-2, "data.global_batch_size": ROWS, **skips}
    config = tiny(**common, **ENGINES[engine], **{"model.tie_embeddings": True})
    assert config.optimizer.weight_decay > 0
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    return trainer, BatchPlacer(mesh, trainer.batch_spec, ROWS)


def begun(engine):
    trainer, place = made(engine)
    state, _ = run(trainer, place, trainer.init(jax.random.key(0)), range(1), ROWS)
    return trainer, place, state


SCHEDULED = pytest.param("scheduled", marks=pytest.mark.slow)


@pytest.mark.parametrize("engine", ["circular", "mpmd", SCHEDULED])
def test_checkpoint_of_one_engine_continues_on_the_other(engine):
    """Two steps on one and two on the other are four on either."""
    ends = []
    for names in ((engine, "sequential"), ("sequential", engine)):
        (first, place), second = made(names[0]), made(names[1])
        state, before = run(first, place, first.init(jax.random.key(0)), range(2), ROWS)
        handed = second[0].from_canonical(placed(second[0], first.to_canonical(state)))
        state, after = run(*second, handed, range(2, 4), ROWS)
        ends.append((before + after, second[0].to_canonical(state)))
    (metrics, state), (others, other) = ends
    for name in metrics[0]:
        values = [[float(step[name]) for step in steps] for steps in (metrics, others)]
        np.testing.assert_allclose(*values, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    moments = jax.tree.leaves(state.opt_state.mu), jax.tree.leaves(other.opt_state.mu)
    for a, b in zip(*moments, strict=True):
        assert np.max(np.abs(a - b)) <= 1e-4 * np.max(np.abs(b))
    assert_same_bits(state.key, other.key)
    assert int(state.step) == int(other.step) == 4


@pytest.mark.parametrize("engine", ["circular", "mpmd"])
def test_step_that_is_not_finite_changes_counters_only(engine):
    trainer, place, state = begun(engine)
    before = trainer.to_canonical(state)
    poisoned = make_batch(ROWS)
    poisoned["weights"][3, 2] = np.nan
    for skips in (1, 2):
        state, metrics = trainer.step(state, place(poisoned))
        assert not metrics["finite"]
        assert int(trainer.to_canonical(state).skips) == skips
    after = trainer.to_canonical(state)
    for part in ("params", "opt_state", "key"):
        assert_same_bits(getattr(after, part), getattr(before, part))
    assert int(after.step) == 3
    state, metrics = trainer.step(state, place(make_batch(ROWS)))
    assert metrics["finite"]
    assert int(trainer.to_canonical(state).skips) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_step_without_targets_changes_nothing_and_is_skipped(engine):
    trainer, place, state = begun(engine)
    before = trainer.to_canonical(state)
    batch = make_batch(ROWS)
    batch["weights"][:] = 0
    state, metrics = trainer.step(state, place(batch))
    after = trainer.to_canonical(state)
    assert metrics["finite"]
    assert int(metrics["skipped"]) == 1
    assert (int(after.skips), int(after.step)) == (0, 2)
    for part in ("params", "opt_state", "history"):
        assert_same_bits(getattr(after, part), getattr(before, part))


@pytest.mark.parametrize("engine", ["circular", "mpmd"])
def test_step_donates_parameters_makes_no_implicit_transfer_and_leaves_host_copies_alone(engine):
    trainer, place = made(engine)
    state, batch = trainer.init(jax.random.key(0)), place(make_batch(ROWS))
    on_host = trainer.to_canonical(state)
    before = jax.tree.map(np.copy, on_host)
    with jax.transfer_guard("disallow"):
        after, _ = trainer.step(state, batch)
    params = [part.params for part in getattr(state, "stages", [state])]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    trainer.step(after, place(make_batch(ROWS)))
    assert_same_bits(on_host, before)


@pytest.mark.parametrize("engine", ["sequential", "mpmd"])
def test_restart_optimizer_begins_its_state_anew_and_keeps_the_rest(engine):
    trainer, _, state = begun(engine)
    fresh = trainer.to_canonical(trainer.init(jax.random.key(0)))
    trained = trainer.to_canonical(state)
    again = trainer.to_canonical(trainer.restart_optimizer(state))
    assert_same_bits(again.opt_state, fresh.opt_state)
    assert_same_bits((again.params, again.step), (trained.params, trained.step))


def test_metrics_are_scalars_of_the_global_batch():
    trainer, place = made("circular")
    state, batch = trainer.init(jax.random.key(0)), make_batch(ROWS)
    sums = trainer.forward(state, place(batch))
    _, metrics = trainer.step(state, place(batch))
    assert {name: value.shape for name, value in metrics.items()} == dict.fromkeys(metrics, ())
    assert float(sums["weight"]) == batch["weights"].sum()
    loss = sums["cross_entropy"] / sums["weight"]
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-5)
