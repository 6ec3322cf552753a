"""Weights that the scheduled engine gathers in steps: `pipeline.fsdp_prefetch`."""

import jax
import numpy as np
import pytest
from helpers import fsdp_stages
from helpers.engines import EngineUnderTest, make_batch
from jax.extend.core import Jaxpr

from maxpipe.pipeline.jaxprs import CHECKPOINTS, inner_jaxprs, open_jaxpr


def config_of(**values):
    return fsdp_stages.config_of(**{"data.global_batch_size": 12} | values)


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
    return EngineUnderTest(config_of(**values)).traced()


def test_layers_with_prefetch_gather_no_weights_of_their_own():
    assert gathers(traced(**{"pipeline.fsdp_prefetch": "false"}).jaxpr) > 0
    assert gathers(traced(**{"pipeline.fsdp_prefetch": "true"}).jaxpr) == 0
