"""Weights that the scheduled engine gathers in steps: `pipeline.fsdp_prefetch`."""

import math

import jax
import numpy as np
import pytest
from helpers import fsdp_stages
from helpers.engines import (
    EngineUnderTest,
    assert_same,
    make_batch,
    reference,
)
from jax.extend.core import Jaxpr

from maxpipe.pipeline.jaxprs import CHECKPOINTS, inner_jaxprs, open_jaxpr


def config_of(**values):
    return fsdp_stages.config_of(**{"data.global_batch_size": 12} | values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"pipeline.skip_idle": "false"}, marks=pytest.mark.slow),
        pytest.param(
            {"pipeline.schedule": "lockstep_zb", "pipeline.remat_policy": "minimal"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh.ici.fsdp": 2, "mesh.ici.tensor": 2, "pipeline.num_repeats": 2},
            marks=pytest.mark.slow,
        ),
        {"mesh.ici.fsdp": 2, "pipeline.delay_activation_forwarding": True}
        | {"pipeline.num_microbatches": 6},
        pytest.param(
            {"mesh.ici.fsdp": 2, "pipeline.num_layers_per_stage": 2, "pipeline.num_repeats": 2}
            | {"model.num_layers": 8, "pipeline.scan_layers_per_stage": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "four_shards",
        "no_slot_skipped",
        "split_backwards",
        "tensor",
        "delayed",
        "several_layers",
    ],
)
def test_gradients_with_prefetch_equal_those_without_and_the_reference(values):
    expected = reference(config_of(**values).model, 12)
    for prefetch in ("true", "false"):
        config = config_of(**values, **{"pipeline.fsdp_prefetch": prefetch})
        actual = EngineUnderTest(config, idle_fill=math.nan).train(make_batch(12))
        assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_bfloat16_with_prefetch_is_as_near_as_without(tensor):
    """The first gradients of a ring leave in bfloat16, and sums are float32."""
    values = {"model.dtype": "bfloat16", "mesh.ici.fsdp": 2, "mesh.ici.tensor": tensor}
    steps = [
        EngineUnderTest(config_of(**values, **{"pipeline.fsdp_prefetch": prefetch}))
        for prefetch in ("true", "false")
    ]
    actual, expected = (step.train(make_batch(12)) for step in steps)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-2)
    for a, b in zip(*map(jax.tree.leaves, (actual.gradients, expected.gradients)), strict=True):
        assert np.max(np.abs(a - b)) <= 0.05 * np.max(np.abs(b))


def test_evaluation_with_prefetch_is_that_without():
    losses = []
    for prefetch in ("true", "false"):
        step = EngineUnderTest(config_of(**{"pipeline.fsdp_prefetch": prefetch}))
        losses.append(step.evaluate(make_batch(12)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def gathers(jaxpr: Jaxpr, *, in_layer: bool = False) -> int:
    """Count all-gathers in what `jax.checkpoint` wraps: the layers."""
    return sum(
        (in_layer and eqn.primitive.name == "all_gather")
        + sum(
            gathers(open_jaxpr(inner), in_layer=in_layer or eqn.primitive.name in CHECKPOINTS)
            for inner in inner_jaxprs(eqn)
        )
        for eqn in jaxpr.eqns
    )


def traced(**values):
    engine = EngineUnderTest(config_of(**values))
    batch, key = make_batch(12), jax.random.key(0)
    return jax.make_jaxpr(engine.pipeline.loss_and_gradients)(engine.params, batch, key)


def test_layers_with_prefetch_gather_no_weights_of_their_own():
    assert gathers(traced(**{"pipeline.fsdp_prefetch": "false"}).jaxpr) > 0
    assert gathers(traced(**{"pipeline.fsdp_prefetch": "true"}).jaxpr) == 0
