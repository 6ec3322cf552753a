import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config import OptimizerConfig
from maxpipe.training.optimizers import adamw
from maxpipe.training.state import map_by_parameter, new_state

PARAMS = {"embed": {"table": jnp.zeros(2)}, "layers": {"mlp": {"table": jnp.zeros(3)}}}
NAMES = {"embed": {"table": "E"}, "layers": {"mlp": {"table": "L"}}}


def make_state():
    optimizer_state = adamw(OptimizerConfig(), {}).init(PARAMS)
    return new_state(PARAMS, optimizer_state, jax.random.key(3))


def test_moments_belong_to_their_parameter_and_counters_to_none():
    found = map_by_parameter(lambda leaf, name: (leaf.shape, name), make_state(), NAMES, "other")
    for mirror in (found.params, found.opt_state.mu, found.opt_state.nu):
        assert mirror == {
            "embed": {"table": ((2,), "E")},
            "layers": {"mlp": {"table": ((3,), "L")}},
        }
    assert [found.step, found.skips, found.opt_state.count] == [((), "other")] * 3
    assert found.key[1] == "other"


def test_every_step_has_a_key_of_its_own_from_the_key_of_the_run():
    state = make_state()
    again = jax.random.wrap_key_data(jnp.asarray(np.asarray(state.key)))
    assert state.step_key() == jax.random.fold_in(again, 0)
    assert state.step_key() != jax.random.fold_in(again, 1)


def test_a_new_state_has_done_nothing():
    state = make_state()
    assert (int(state.step), int(state.skips)) == (0, 0)
    assert state.key.dtype == jnp.uint32
