"""A mixture of experts has the same losses and gradients on every engine and layout."""

import pytest
from helpers.engines import SEQUENCE_LENGTH, EngineUnderTest, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest
from helpers.routing import assert_same_as_one_device

ROWS = 16
EXPERTS = {
    "model.moe.experts": 6,
    "model.moe.per_token": 2,
    "model.moe.mlp_dim": 16,
    "model.moe.balance_loss": 0.3,
    "model.moe.z_loss": 0.1,
    "model.moe.bias_rate": 0.5,
}
# As gpt-oss has them; the limit is within the range of values.
BIASES = {
    "model.mlp_bias": True,
    "model.mlp_activation": "quick_gelu",
    "model.mlp_limit": 0.5,
    "model.mlp_up_offset": 1.0,
    "model.moe.logit_bias": True,
    "model.moe.router": "topk_softmax",
    "model.moe.bias_rate": 0.0,
}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
CASES = {
    "sequential": {
        "pipeline.engine": "sequential",
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
        "mesh.ici.context": 2,
    },
    "lockstep_1f1b": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.num_repeats": 2,
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
        "model.moe.shared_experts": 1,
        **BIASES,
    },
    "lockstep_zb": {
        **STAGES,
        "pipeline.schedule": "lockstep_zb",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.context": 2,
        "mesh.ici.data": 2,
    },
    "circular": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.num_repeats": 2,
        "pipeline.fsdp_gather": "once",
        "mesh.ici.context": 2,
        "mesh.ici.tensor": 2,
    },
    "circular_per_iteration": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.fsdp_gather": "per_iteration",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.data": 2,
        "mesh.ici.fsdp": 2,
        "model.moe.router": "sigmoid",
    },
    "1f1b": {
        **STAGES,
        "pipeline.schedule": "1f1b",
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
        **BIASES,
    },
    "zb_v": {
        **STAGES,
        "pipeline.schedule": "zb_v",
        "pipeline.num_repeats": 2,
        "pipeline.remat_policy": "minimal",
        "mesh.ici.context": 2,
    },
}


# The others differ from one of the rest in less.
FURTHER = ("circular", "lockstep_zb", "circular_per_iteration", "1f1b")
MARKED = [pytest.param(n, marks=[pytest.mark.slow] if n in FURTHER else []) for n in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_losses_and_gradients_equal_those_of_one_device(name):
    config = tiny(**EXPERTS | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    expected = reference(config.model, ROWS)
    assert set(expected.auxiliary) == {"balance_loss", "z_loss"}
    assignments = ROWS * SEQUENCE_LENGTH * config.model.moe.per_token
    assert expected.load.sum(axis=1).tolist() == [assignments] * config.model.num_layers
    assert_same_as_one_device(subject(config).train, config.model, ROWS)
