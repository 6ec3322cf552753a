"""States: what belongs to which parameter, and how trainers tell layers from everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from helpers.trainers import assert_same_bits, drawn, placed

from maxpipe.builder import build_trainer
from maxpipe.config import OptimizerConfig
from maxpipe.model import program
from maxpipe.model.layers import RMSNorm
from maxpipe.model.parameters import ParamSpec
from maxpipe.training.optimizers import adafactor, adamw
from maxpipe.training.state import TrainState, map_by_parameter

PARAMS = {"embed": {"table": jnp.zeros(2)}, "layers": {"mlp": {"table": jnp.zeros(3)}}}
NAMES = {"embed": {"table": "E"}, "layers": {"mlp": {"table": "L"}}}


def make_state():
    optimizer_state = adamw(OptimizerConfig(), {}).init(PARAMS)
    key, zero = jax.random.key_data(jax.random.key(3)), jnp.int32(0)
    return TrainState(zero, key, PARAMS, optimizer_state, zero)


def test_map_by_parameter_gives_moments_their_parameter_and_counters_the_other_value():
    mapped = map_by_parameter(lambda leaf, name: (leaf.shape, name), make_state(), NAMES, "other")
    for mirror in (mapped.params, mapped.opt_state.mu, mapped.opt_state.nu):
        tables = {"table": ((2,), "E")}, {"mlp": {"table": ((3,), "L")}}
        assert mirror == dict(zip(("embed", "layers"), tables, strict=True))
    assert [mapped.step, mapped.skips, mapped.opt_state.count] == [((), "other")] * 3
    assert mapped.key[1] == "other"
    # All of a state of its own for each parameter
    specs = jax.tree.map(lambda p: ParamSpec(p.shape, jnp.dtype("float32"), ("norm",), 0.0), PARAMS)
    opt_state = adafactor(OptimizerConfig(), specs).init(PARAMS)
    mapped = map_by_parameter(lambda leaf, name: name, opt_state, NAMES, "other")
    assert len(jax.tree.leaves(opt_state["embed"])) > 1  # statistics and a counter
    assert set(jax.tree.leaves(mapped["embed"])) == {"E"}
    assert set(jax.tree.leaves(mapped["layers"])) == {"L"}


class HeadWithLayers(program.Head):
    """A head that has a part called `layers`."""

    def __init__(self, config):
        super().__init__(config)
        self.layers = RMSNorm(config.embed_dim, eps=config.norm_eps, dtype=config.param_dtype)


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline.schedule": "circular", "pipeline.num_repeats": 2, "optimizer.name": "muon"},
        {"pipeline.schedule": "1f1b", "pipeline.layers_per_stage": [3, 1]},
    ],
    ids=["circular", "mpmd"],
)
def test_trainers_do_not_take_a_part_of_the_head_called_layers_for_layers(monkeypatch, layout):
    monkeypatch.setattr(program, "Head", HeadWithLayers)
    config = tiny(**{"mesh.ici.stage": 2, **layout})
    trainer = build_trainer(config, make_mesh(config))
    shapes = trainer.abstract_canonical()
    assert shapes.params["head"]["layers"]["scale"].shape == (16,)
    canonical = drawn(trainer)
    live = trainer.from_canonical(placed(trainer, canonical))
    assert_same_bits(trainer.to_canonical(live), canonical)


def test_every_step_has_a_key_of_its_own_from_the_key_of_the_run():
    state = make_state()
    again = jax.random.wrap_key_data(jnp.asarray(np.asarray(state.key)))
    assert state.step_key() == jax.random.fold_in(again, 0)
    assert state.step_key() != jax.random.fold_in(again, 1)
