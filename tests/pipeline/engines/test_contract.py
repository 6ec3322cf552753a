"""All four engines implement one contract: they are built and called in the same way."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_engine, build_engine_inputs
from maxpipe.config.catalog import ENGINES
from maxpipe.pipeline.engines.base import Engine

LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential"},
    "circular": {"pipeline.schedule": "circular", "pipeline.num_repeats": 2},
    "scheduled": {"pipeline.schedule": "lockstep_1f1b", "pipeline.num_repeats": 2},
    "mpmd": {"pipeline.schedule": "1f1b", "pipeline.layers_per_stage": [3, 1]},
}
METHODS = sorted(Engine.__abstractmethods__ - {"__init__"})


def build(name):
    stages = {} if name == "sequential" else {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
    config = tiny(**stages, **LAYOUTS[name])
    assert config.pipeline.engine == name
    return build_engine(config, build_engine_inputs(config, make_mesh(config)))


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request):
    return build(request.param)


def test_contract_covers_every_engine_of_the_configuration():
    assert set(LAYOUTS) == set(ENGINES)


def test_engine_is_built_from_engine_inputs_alone(engine):
    assert isinstance(engine, Engine)
    required = [
        name
        for name, parameter in inspect.signature(type(engine)).parameters.items()
        if parameter.default is parameter.empty
    ]
    assert len(required) == 1


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_the_signature_of_the_contract(engine, method):
    def parameters(owner):
        return [
            (p.name, p.kind) for p in inspect.signature(getattr(owner, method)).parameters.values()
        ]

    assert parameters(type(engine)) == parameters(Engine)


def test_a_layer_parameter_survives_the_live_layout(engine):
    leaf = jnp.arange(4 * 3, dtype=jnp.float32).reshape(4, 3)
    live = engine.from_canonical(leaf)
    np.testing.assert_array_equal(engine.to_canonical(live), leaf)
    # Live arrays have the dimensions of `layer_axes` in the place of the layers.
    assert {x.ndim for x in jax.tree.leaves(live)} == {len(engine.layer_axes) + 1}


def test_layer_index_has_every_layer_once(engine):
    live = engine.from_canonical(jnp.arange(4))
    index = engine.layer_index()
    assert jax.tree.map(jnp.shape, index) == jax.tree.map(jnp.shape, live)
    layers = np.concatenate([np.ravel(i) for i in jax.tree.leaves(index)])
    assert sorted(layers[layers < 4]) == [0, 1, 2, 3]
