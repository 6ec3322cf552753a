"""The first dense layers of a model of experts, next to its other layers, on every engine."""

import dataclasses

import numpy as np
import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest

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
    "1f1b": {**STAGES, "pipeline.schedule": "1f1b", "mesh.ici.tensor": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_one_device(name):
    config = tiny(**MODEL | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    expected = reference(config.model, ROWS)
    assert set(expected.gradients["embed"]["first"]) == {"0", "1"}
    assert "moe" not in expected.gradients["embed"]["first"]["0"]
    assert_same(subject(config).train(make_batch(ROWS)), expected)


def test_windows_lie_in_layers_by_their_place_in_the_whole_model():
    """A pattern that starts with the stack, instead of the first layers, gives another loss."""
    model = tiny(**MODEL).model
    shifted = dataclasses.replace(model, layer_pattern=["local", "global", "global"])
    losses = [reference(m, ROWS).loss for m in (model, shifted)]
    assert np.abs(np.subtract(*losses)) > 1e-3
