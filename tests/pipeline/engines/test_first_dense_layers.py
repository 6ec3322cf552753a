"""The first dense layers of a model of experts, next to its other layers, on every engine."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest

from maxpipe.config.catalog import RematPolicy
from maxpipe.model.layers import SideInputs
from maxpipe.pipeline.chunk import apply_first_layers, layer_function

ROWS = 16
MODEL = {
    "model.num_layers": 6,
    "model.first_dense_layers": 2,
    "model.moe.experts": 4,
    "model.moe.mlp_dim": 16,
    "model.moe.balance_loss": 0.3,
    # Layers know their place in the model: the third and the sixth have a window.
    "model.layer_pattern": ["global", "global", "local"],
    "model.attention_window": 3,
}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
CASES = {
    "sequential": {
        "pipeline.engine": "sequential",
        "pipeline.num_microbatches": 2,
        "mesh.ici.fsdp": 2,
        "mesh.ici.context": 2,
    },
    "lockstep_1f1b": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.fsdp": 2,
        "model.tie_embeddings": True,
    },
    "lockstep_outside_before": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.fsdp_gather": "once",
        "pipeline.parallel_layers": 2,
        "pipeline.outside_layers": "before",
        "mesh.ici.tensor": 2,
    },
    "circular": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.context": 2,
    },
    "1f1b": {
        **STAGES,
        "pipeline.schedule": "1f1b",
        "mesh.ici.tensor": 2,
        "model.moe.router": "sigmoid",
        "model.moe.selection_bias": True,
    },
}

# Layers before the pipeline, experts among them, are more than the dense ones alone.
FURTHER = ("lockstep_1f1b", "lockstep_outside_before", "sequential", "1f1b")
MARKED = [pytest.param(n, marks=[pytest.mark.slow] if n in FURTHER else []) for n in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_losses_and_gradients_equal_those_of_one_device(name):
    config = tiny(**MODEL | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    expected = reference(config.model, ROWS)
    assert set(expected.gradients["embed"]["first"]) == {"0", "1"}
    assert "moe" not in expected.gradients["embed"]["first"]["0"]
    assert_same(subject(config).train(make_batch(ROWS)), expected)


def test_layers_know_their_number_in_the_whole_model():
    def block(layer, x, side, key):
        return 10 * x + side.layer_index, {}

    config = tiny(**MODEL).model
    program = SimpleNamespace(config=config, needs_key=False, block=block)
    program.first_block = lambda *args: block(*args)[0]
    side, first = SideInputs(None, None, None), {"0": {}, "1": {}}
    x = apply_first_layers(program, first, lambda p: p, RematPolicy(), jnp.int32(9), side, None)
    apply = layer_function(program, lambda p: p, padded=False)
    for i in range(config.stacked_layers):
        x, _ = apply({}, jnp.int32(i), x, side, None)
    assert x == 9_012_345
