"""Initial values and layouts of trainers."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from helpers.trainers import assert_same_bits, drawn, placed
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer

pytestmark = pytest.mark.same_rounding
STAGES = {"mesh.ici.stage": 2}
MPMD = {"pipeline.schedule": "1f1b", "pipeline.layers_per_stage": [5, 3]}
LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential"},
    "sequential fsdp": {"pipeline.engine": "sequential", "mesh.ici.fsdp": 4, "mesh.ici.tensor": 2},
    "circular 2x2x2": {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "pipeline.num_repeats": 2},
    "circular 4x1x2": {"mesh.ici.stage": 4, "pipeline.num_repeats": 1, "mesh.ici.tensor": 2},
    "circular uneven": STAGES | {"mesh.ici.data": 2, "pipeline.layers_per_stage": [1, 4, 2, 1]},
    "scheduled": STAGES | {"pipeline.schedule": "lockstep_1f1b"},
    "mpmd": STAGES | MPMD | {"mesh.ici.fsdp": 2},
}


@cache
def made(layout):
    common = {"model.num_layers": 8, "model.tie_embeddings": True, "data.global_batch_size": 16}
    config = tiny(**common | LAYOUTS[layout])
    trainer = build_trainer(config, make_mesh(config))
    return trainer, trainer.to_canonical(trainer.init(jax.random.key(7)))


FIRST = ("sequential", "circular 2x2x2", "circular uneven", "mpmd")
MARKED = [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in LAYOUTS]


@pytest.mark.parametrize("layout", MARKED)
def test_canonical_state_is_that_of_one_device_and_round_trips_without_warnings_of_xla(
    layout, capfd
):
    trainer, canonical = made(layout)
    assert_same_bits(canonical, made("sequential")[1])
    described = jax.tree.leaves(trainer.abstract_canonical())
    for leaf, like in zip(jax.tree.leaves(canonical), described, strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        like.sharding.shard_shape(like.shape)  # raises if it does not divide
    assert canonical.params["layers"]["mlp"]["up"].shape == (8, 16, 32)
    assert canonical.opt_state.mu["layers"]["mlp"]["up"].shape == (8, 16, 32)
    numbers = drawn(trainer)
    live = trainer.from_canonical(placed(trainer, numbers))
    assert_same_bits(trainer.to_canonical(live), numbers)
    assert "rematerialization" not in capfd.readouterr().err
    if layout != "mpmd":  # whose stages say themselves where their parts are
        described = jax.tree.leaves(trainer.abstract_state())
        for leaf, like in zip(jax.tree.leaves(live), described, strict=True):
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_initial_values_differ_between_seeds_and_layers():
    trainer, initial = made("sequential")
    other = trainer.to_canonical(trainer.init(jax.random.key(8)))
    up = initial.params["layers"]["mlp"]["up"]
    assert (other.params["layers"]["mlp"]["up"] != up).mean() > 0.99
    for leaf in (up, initial.params["layers"]["attention"]["out"]):
        assert len(np.unique(leaf)) > 0.99 * leaf.size


def test_canonical_leaves_have_the_stage_axis_over_another_dimension():
    """Over the layers, every device would hold all of them for a moment."""
    trainer, _ = made("circular 2x2x2")
    spec = trainer.abstract_canonical().params["layers"]["mlp"]["up"].sharding.spec
    assert spec == P(None, ("fsdp", "stage"), None)


def test_moments_have_the_shardings_of_their_parameters():
    state = made("circular 2x2x2")[0].abstract_state()
    trees = state.params, state.opt_state.mu, state.opt_state.nu
    params, mu, nu = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in trees)
    assert params == mu == nu
    assert params["layers"]["mlp"]["up"].spec == P(None, "stage", None, "fsdp", None)
