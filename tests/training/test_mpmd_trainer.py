"""The mpmd trainer: initial values, steps and checkpoints as those of other trainers."""

import jax
import numpy as np
import pytest
from helpers.engines import make_batch, make_mesh, tiny

from maxpipe.builder import build_trainer
from maxpipe.training.batches import BatchPlacer

ROWS = 16
MPMD = {
    "pipeline.schedule": "1f1b",
    "mesh.ici.stage": 2,
    "mesh.ici.fsdp": 2,
    "pipeline.layers_per_stage": [3, 1],
    "pipeline.num_microbatches": 4,
}


def make_trainer(**values):
    defaults = {
        "optimizer.learning_rate": 1e-2,
        "data.global_batch_size": ROWS,
        "model.tie_embeddings": True,
        "optimizer.max_consecutive_skips": 5,
        "optimizer.spike_window": 16,
    }
    config = tiny(**(defaults | values))
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    return trainer, BatchPlacer(mesh, trainer.batch_spec, ROWS)


@pytest.fixture(scope="module")
def mpmd():
    return make_trainer(**MPMD)


@pytest.fixture(scope="module")
def sequential():
    return make_trainer(**{"pipeline.engine": "sequential"})


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), (
            jax.tree_util.keystr(path)
        )


def restored(trainer, canonical):
    """Return what a checkpoint of `canonical` holds, laid out as the trainer asks for."""
    return jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding), canonical, trainer.abstract_canonical()
    )


def run(trainer, place, state, steps):
    metrics = []
    for i in steps:
        state, step_metrics = trainer.step(state, place(make_batch(ROWS, seed=i)))
        metrics.append({name: float(value) for name, value in step_metrics.items()})
    return state, metrics


def test_initial_values_equal_those_of_the_sequential_engine(mpmd, sequential):
    states = [
        trainer.to_canonical(trainer.init(jax.random.key(7))) for trainer, _ in (mpmd, sequential)
    ]
    assert_same_bits(*states)


def test_canonical_state_is_as_described(mpmd):
    trainer, _ = mpmd
    canonical = trainer.to_canonical(trainer.init(jax.random.key(0)))
    for leaf, described in zip(
        jax.tree.leaves(canonical), jax.tree.leaves(trainer.abstract_canonical()), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (described.shape, described.dtype)
        described.sharding.shard_shape(described.shape)  # raises if it does not divide


def test_canonical_state_round_trips_to_the_bit(mpmd):
    trainer, _ = mpmd
    shapes = trainer.abstract_canonical()
    rng = np.random.default_rng(0)
    canonical = jax.tree.map(lambda leaf: (rng.random(leaf.shape) * 100).astype(leaf.dtype), shapes)
    assert_same_bits(
        trainer.to_canonical(trainer.from_canonical(restored(trainer, canonical))), canonical
    )


def test_checkpoint_of_one_engine_continues_on_the_other(mpmd, sequential):
    """Two steps on one and two on the other are four on either."""
    ends = []
    for first, second in ((mpmd, sequential), (sequential, mpmd)):
        state, before = run(*first, first[0].init(jax.random.key(0)), range(2))
        handed = second[0].from_canonical(restored(second[0], first[0].to_canonical(state)))
        state, after = run(*second, handed, range(2, 4))
        ends.append((before + after, second[0].to_canonical(state)))
    for name in ends[0][0][0]:
        values = [[metrics[name] for metrics in end[0]] for end in ends]
        np.testing.assert_allclose(*values, rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves(ends[0][1].params), jax.tree.leaves(ends[1][1].params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert_same_bits(ends[0][1].key, ends[1][1].key)
    assert int(ends[0][1].step) == int(ends[1][1].step) == 4


def test_step_that_is_not_finite_changes_counters_only(mpmd):
    trainer, place = mpmd
    state, _ = run(trainer, place, trainer.init(jax.random.key(0)), range(1))
    before = trainer.to_canonical(state)
    poisoned = make_batch(ROWS)
    poisoned["weights"][3, 2] = np.nan
    state, metrics = trainer.step(state, place(poisoned))
    after = trainer.to_canonical(state)
    assert not metrics["finite"]
    assert int(after.skips) == 1
    assert int(after.step) == 2
    assert_same_bits(
        (after.params, after.opt_state, after.key), (before.params, before.opt_state, before.key)
    )


@pytest.mark.parametrize(
    "engine",
    [
        MPMD,
        {"pipeline.engine": "sequential"},
        {"mesh.ici.stage": 2, "pipeline.engine": "circular"},
        {"mesh.ici.stage": 2, "pipeline.schedule": "lockstep_1f1b"},
    ],
    ids=["mpmd", "sequential", "circular", "scheduled"],
)
def test_step_without_targets_changes_nothing_and_is_skipped(engine):
    trainer, place = make_trainer(**engine, **{"optimizer.weight_decay": 0.5})
    state, _ = run(trainer, place, trainer.init(jax.random.key(0)), range(1))
    before = trainer.to_canonical(state)
    batch = make_batch(ROWS)
    batch["weights"][:] = 0
    state, metrics = trainer.step(state, place(batch))
    after = trainer.to_canonical(state)
    assert metrics["finite"]
    assert int(metrics["skipped"]) == 1
    assert (int(after.skips), int(after.step)) == (0, 2)
    assert_same_bits(
        (after.params, after.opt_state, after.history),
        (before.params, before.opt_state, before.history),
    )


def test_step_donates_parameters_and_makes_no_implicit_transfer(mpmd):
    trainer, place = mpmd
    state, batch = trainer.init(jax.random.key(0)), place(make_batch(ROWS))
    with jax.transfer_guard("disallow"):
        trainer.step(state, batch)
    assert all(
        leaf.is_deleted() for leaf in jax.tree.leaves([stage.params for stage in state.stages])
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(MPMD, marks=pytest.mark.slow),
        {"pipeline.engine": "sequential"},
    ],
    ids=["mpmd", "one"],
)
def test_restart_optimizer_begins_its_state_anew_and_keeps_the_rest(layout):
    trainer, place = make_trainer(**layout, **{"optimizer.name": "muon"})
    fresh = trainer.to_canonical(trainer.init(jax.random.key(7)))
    state, _ = run(trainer, place, trainer.init(jax.random.key(7)), range(2))
    trained = trainer.to_canonical(state)
    again = trainer.to_canonical(trainer.restart_optimizer(state))
    assert_same_bits(again.opt_state, fresh.opt_state)
    assert_same_bits((again.params, again.step), (trained.params, trained.step))
