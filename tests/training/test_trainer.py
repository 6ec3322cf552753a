"""The SPMD trainer: initial values, layouts, steps, and steps that are not finite."""

import jax
import numpy as np
import pytest
from helpers.engines import make_batch, make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer
from maxpipe.devices.host_memory import to_host
from maxpipe.training.batches import BatchPlacer

ROWS = 16
LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential"},
    "sequential fsdp": {"pipeline.engine": "sequential", "mesh.ici.fsdp": 4, "mesh.ici.tensor": 2},
    "circular 2x2x2": {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "pipeline.num_repeats": 2},
    "circular 4x1x2": {"mesh.ici.stage": 4, "pipeline.num_repeats": 1, "mesh.ici.tensor": 2},
    "circular uneven": {
        "mesh.ici.stage": 2,
        "mesh.ici.data": 2,
        "pipeline.layers_per_stage": [1, 4, 2, 1],
    },
}


def make_trainer(layout, **values):
    """Return (trainer, place) of a model with eight layers."""
    defaults = {
        "model.num_layers": 8,
        "optimizer.learning_rate": 1e-2,
        "data.global_batch_size": ROWS,
    }
    config = tiny(**(defaults | LAYOUTS[layout] | values))
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    return trainer, BatchPlacer(mesh, trainer.batch_spec, ROWS)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), (
            jax.tree_util.keystr(path)
        )


def numbers(state):
    """Return the state with different numbers in every leaf: a lost or swapped layer shows."""
    leaves, tree = jax.tree.flatten(state)
    filled = []
    for i, leaf in enumerate(leaves):
        values = (np.arange(leaf.size) + 1000 * i).reshape(leaf.shape).astype(leaf.dtype)
        filled.append(jax.device_put(values, leaf.sharding))
    return jax.tree.unflatten(tree, filled)


def restored(trainer, canonical):
    """Return what a checkpoint of `canonical` holds, laid out as the trainer asks for."""
    return jax.tree.map(
        lambda x, to: jax.device_put(x, to.sharding), canonical, trainer.abstract_canonical()
    )


@pytest.fixture(scope="module")
def initial():
    """The canonical initial state of the seed 7, from the sequential engine."""
    trainer, _ = make_trainer("sequential")
    return trainer.to_canonical(trainer.init(jax.random.key(7)))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "sequential"])
def test_initial_values_depend_on_the_seed_and_not_on_the_layout(layout, initial):
    trainer, _ = make_trainer(layout)
    assert_same_bits(trainer.to_canonical(trainer.init(jax.random.key(7))), initial)


def test_initial_values_of_another_seed_differ(initial):
    trainer, _ = make_trainer("sequential")
    other = trainer.to_canonical(trainer.init(jax.random.key(8)))
    assert (
        other.params["layers"]["mlp"]["up"] != initial.params["layers"]["mlp"]["up"]
    ).mean() > 0.99


def test_initial_values_differ_between_layers(initial):
    for leaf in (
        initial.params["layers"]["mlp"]["up"],
        initial.params["layers"]["attention"]["out"],
    ):
        assert len(np.unique(leaf)) > 0.99 * leaf.size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_canonical_state_round_trips_to_the_bit_without_warnings_of_xla(layout, capfd):
    trainer, _ = make_trainer(layout)
    canonical = trainer.to_canonical(numbers(trainer.init(jax.random.key(0))))
    live = trainer.from_canonical(restored(trainer, canonical))
    assert_same_bits(trainer.to_canonical(live), canonical)
    assert "rematerialization" not in capfd.readouterr().err
    for leaf, described in zip(
        jax.tree.leaves(live), jax.tree.leaves(trainer.abstract_state()), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(described.sharding, leaf.ndim)


def test_state_saved_in_one_layout_is_restored_in_another():
    source, _ = make_trainer("circular uneven")
    canonical = source.to_canonical(numbers(source.init(jax.random.key(0))))
    for layout in LAYOUTS:
        target, _ = make_trainer(layout)
        live = target.from_canonical(restored(target, canonical))
        assert_same_bits(target.to_canonical(live), canonical)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_canonical_layers_are_in_model_order_and_as_described(layout):
    trainer, _ = make_trainer(layout)
    canonical, abstract = (
        trainer.to_canonical(trainer.init(jax.random.key(0))),
        trainer.abstract_canonical(),
    )
    for leaf, described in zip(jax.tree.leaves(canonical), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (described.shape, described.dtype)
        described.sharding.shard_shape(described.shape)  # raises if it does not divide
    assert canonical.params["layers"]["mlp"]["up"].shape == (8, 16, 32)
    assert canonical.opt_state.mu["layers"]["mlp"]["up"].shape == (8, 16, 32)


def test_canonical_leaves_have_the_stage_axis_over_another_dimension():
    """Over the layers, every device would hold all of them for a moment."""
    trainer, _ = make_trainer("circular 2x2x2")
    spec = trainer.abstract_canonical().params["layers"]["mlp"]["up"].sharding.spec
    assert spec == P(None, ("fsdp", "stage"), None)


def test_moments_have_the_shardings_of_their_parameters():
    state = make_trainer("circular 2x2x2")[0].abstract_state()
    sharding = {"params": state.params, "mu": state.opt_state.mu, "nu": state.opt_state.nu}
    specs = {
        name: jax.tree.map(lambda leaf: leaf.sharding, tree) for name, tree in sharding.items()
    }
    assert specs["params"] == specs["mu"] == specs["nu"]
    assert specs["params"]["layers"]["mlp"]["up"].spec == P(None, "stage", None, "fsdp", None)


class TestSteps:
    @pytest.fixture(scope="class")
    def circular(self):
        return make_trainer("circular 2x2x2", **{"optimizer.max_consecutive_skips": 5})

    def test_three_steps_equal_those_of_the_sequential_engine(self, circular):
        ends = []
        for trainer, place in (circular, make_trainer("sequential")):
            state = trainer.init(jax.random.key(0))
            losses = []
            for i in range(3):
                state, metrics = trainer.step(state, place(make_batch(ROWS, seed=i)))
                losses.append(
                    [float(metrics[name]) for name in ("loss", "grad_norm", "learning_rate")]
                )
            ends.append((losses, trainer.to_canonical(state).opt_state.mu["layers"]["mlp"]["up"]))
        np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-5)
        assert np.max(np.abs(ends[0][1] - ends[1][1])) <= 1e-4 * np.max(np.abs(ends[1][1]))

    def test_step_donates_the_state_and_leaves_host_copies_alone(self, circular):
        trainer, place = circular
        state = trainer.init(jax.random.key(0))
        on_host = trainer.to_canonical(state)
        before = jax.tree.map(np.copy, on_host)
        after, _ = trainer.step(state, place(make_batch(ROWS)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
        trainer.step(after, place(make_batch(ROWS)))
        assert_same_bits(on_host, before)

    def test_step_that_is_not_finite_changes_counters_only(self, circular):
        trainer, place = circular
        state, _ = trainer.step(trainer.init(jax.random.key(0)), place(make_batch(ROWS)))
        before = trainer.to_canonical(state)
        poisoned = make_batch(ROWS)
        poisoned["weights"][3, 2] = np.nan
        for skips in (1, 2):
            state, metrics = trainer.step(state, place(poisoned))
            assert not metrics["finite"]
            assert int(state.skips) == skips
        after = trainer.to_canonical(state)
        assert_same_bits(
            (after.params, after.opt_state, after.key),
            (before.params, before.opt_state, before.key),
        )
        assert int(after.step) == 3
        state, metrics = trainer.step(state, place(make_batch(ROWS)))
        assert metrics["finite"]
        assert int(state.skips) == 0

    def test_loss_falls_in_thirty_steps(self, circular):
        trainer, place = circular
        state, batch = trainer.init(jax.random.key(0)), place(make_batch(ROWS))
        losses = []
        for _ in range(30):
            state, metrics = trainer.step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.9 * losses[0]

    def test_metrics_are_scalars_of_the_global_batch(self, circular):
        trainer, place = circular
        state, batch = trainer.init(jax.random.key(0)), make_batch(ROWS)
        sums = trainer.forward(state, place(batch))
        _, metrics = trainer.step(state, place(batch))
        assert {name: value.shape for name, value in metrics.items()} == dict.fromkeys(metrics, ())
        assert float(sums["weight"]) == batch["weights"].sum()
        assert float(sums["cross_entropy"] / sums["weight"]) == pytest.approx(
            float(metrics["loss"]), rel=1e-5
        )


def test_host_copy_owns_its_memory():
    leaf = jax.numpy.arange(1000.0)
    assert to_host(leaf).flags.owndata
