"""Layers outside the pipeline on the mpmd engine: those of the first or the last chunk's units."""

import pytest
from helpers.engines import (
    EngineUnderTest,
    assert_same,
    make_batch,
    reference,
    tiny,
    with_layers_outside,
)
from helpers.mpmd_under_test import MpmdUnderTest

from maxpipe.config import catalog

# A block with an auxiliary loss.
catalog.BLOCKS["balanced"] = catalog.Block("helpers.balanced_block:BalancedBlock")


CASES = {
    "1f1b": (
        "after",
        3,
        "1f1b",
        {"model.tie_embeddings": True, "model.block": "balanced", "model.dropout": 0.2},
    ),
    # The first and the last chunk lie on the same stage.
    "v_placement": (
        "before",
        2,
        "zb_v",
        {"model.tie_embeddings": True, "pipeline.remat_policy": "minimal"},
    ),
    "v_placement_after": ("after", 1, "zb_v", {"pipeline.remat_policy": "none"}),
    "interleaved": (
        "after",
        2,
        "interleaved_1f1b",
        {"pipeline.num_repeats": 2, "mesh.ici.fsdp": 2, "pipeline.remat_layers": True},
    ),
    "once": (
        "before",
        1,
        "interleaved_1f1b",
        {
            "pipeline.num_repeats": 2,
            "pipeline.fsdp_gather": "once",
            "pipeline.scan_layers_per_stage": True,
            "mesh.ici.fsdp": 2,
        },
    ),
    "uneven": (
        "before",
        2,
        "1f1b",
        {
            "pipeline.layers_per_stage": [1, 3],
            # Layers know their place in the model: every third has a window.
            "model.layer_pattern": ["global", "global", "local"],
            "model.attention_window": 3,
        },
    ),
    "experts": (
        "before",
        1,
        "1f1b",
        {
            "model.num_layers": 6,
            "model.first_dense_layers": 1,
            "model.moe.experts": 4,
            "model.moe.mlp_dim": 16,
            "model.moe.balance_loss": 0.3,
        },
    ),
}
IN_EVERY_RUN = ("1f1b",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.slow])
        for name in CASES
    ],
)
def test_gradients_with_layers_outside_the_pipeline_equal_sequential(case):
    place, num_outside, schedule, values = CASES[case]
    config = with_layers_outside(place, num_outside, **{"pipeline.schedule": schedule} | values)
    rows = config.data.global_batch_size
    assert_same(MpmdUnderTest(config).train(make_batch(rows)), reference(config.model, rows))


def test_evaluate_with_layers_outside_the_pipeline_equals_sequential():
    config = with_layers_outside("before", 1, **{"pipeline.schedule": "1f1b"})
    batch = make_batch(10, seed=1)
    plain = tiny(**{"pipeline.engine": "sequential", "model.num_layers": 5})
    expected = EngineUnderTest(plain).evaluate(batch)
    assert MpmdUnderTest(config).evaluate(batch) == pytest.approx(expected, rel=1e-5)
