"""Low-rank adapters next to a frozen base: every engine and layout trains the adapters alone."""

import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest
from jax.tree_util import keystr, tree_leaves_with_path

ROWS = 16
LORA = {"model.lora.rank": 2, "model.lora.alpha": 6.0, "model.lora.dropout": 0.3}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
CASES = {
    "sequential": {
        "pipeline.engine": "sequential",
        "pipeline.num_microbatches": 2,
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
    },
    "lockstep_1f1b": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.fsdp": 2,
        "model.tie_embeddings": True,
    },
    "lockstep_1f1b_once": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.fsdp_gather": "once",
        "pipeline.parallel_layers": 2,
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
    },
    "lockstep_outside_before": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.parallel_layers": 2,
        "pipeline.outside_layers": "before",
        "mesh.ici.fsdp": 2,
    },
    "lockstep_prefetch": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.fsdp_prefetch": "true",
        "mesh.ici.fsdp": 2,
    },
    "lockstep_zb": {
        **STAGES,
        "pipeline.schedule": "lockstep_zb",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.tensor": 2,
        "model.lora.targets": ["query", "value"],
    },
    "circular": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.num_repeats": 2,
        "mesh.ici.fsdp": 2,
    },
    "circular_per_repeat": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.num_repeats": 2,
        "pipeline.fsdp_gather": "per_repeat",
        "mesh.ici.fsdp": 2,
    },
    "circular_once": {
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.fsdp_gather": "once",
        "mesh.ici.fsdp": 2,
        "mesh.ici.context": 2,
    },
    "1f1b": {**STAGES, "pipeline.schedule": "1f1b", "mesh.ici.tensor": 2},
    "zb_v": {
        **STAGES,
        "pipeline.schedule": "zb_v",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.fsdp": 2,
    },
    "experts": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "model.num_layers": 5,
        "model.first_dense_layers": 1,
        "model.moe.experts": 4,
        "model.moe.mlp_dim": 16,
        "model.moe.shared_experts": 1,
        "model.moe.bias_rate": 0.01,
        "mesh.ici.expert": 2,
    },
}


# The others differ little from these.
FIRST = ("lockstep_1f1b", "circular")
FURTHER = ("1f1b", "sequential", "circular_per_repeat", "zb_v", "experts")


def _marks(name):
    if name in FIRST:
        return []
    return [pytest.mark.slow if name in FURTHER else pytest.mark.grid]


MARKED = [pytest.param(name, marks=_marks(name)) for name in CASES]


@pytest.mark.parametrize("name", MARKED)
def test_loss_and_gradients_of_adapters_equal_those_of_one_device(name):
    config = tiny(**LORA | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    expected = reference(config.model, ROWS)
    names = [keystr(path) for path, _ in tree_leaves_with_path(expected.gradients)]
    assert names
    assert all("_adapter'" in name for name in names)
    assert_same(subject(config).train(make_batch(ROWS)), expected)
