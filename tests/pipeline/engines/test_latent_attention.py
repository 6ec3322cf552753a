"""Latent attention has the same losses and gradients on every engine and layout."""

import pytest
from helpers.engines import LATENT, EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest

ROWS = 16
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
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
        "pipeline.parallel_layers": 2,
        "pipeline.outside_layers": "before",
    },
    "circular": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.num_repeats": 2,
        "pipeline.fsdp_gather": "per_repeat",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.context": 2,
        "mesh.ici.fsdp": 2,
        "model.mla.q_lora_rank": 0,
    },
    "zb_v": {
        **STAGES,
        "pipeline.schedule": "zb_v",
        "pipeline.num_repeats": 2,
        "mesh.ici.context": 2,
        "mesh.ici.tensor": 2,
    },
}


FIRST = ("sequential", "zb_v")
MARKED = [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_losses_and_gradients_equal_those_of_one_device(name):
    config = tiny(**LATENT | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    assert_same(subject(config).train(make_batch(ROWS)), reference(config.model, ROWS))
