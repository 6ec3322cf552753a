"""Layers outside the pipeline on the scheduled engine: `pipeline.parallel_layers`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    EngineUnderTest,
    assert_same,
    make_batch,
    reference,
    tiny,
    with_layers_outside,
)
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config import catalog
from maxpipe.model.layers import SideInputs
from maxpipe.pipeline.engines.scheduled.outside import LayerInputs, ShardedLayers
from maxpipe.pipeline.manual import MANUAL_AXES, psum

# A block with an auxiliary loss.
catalog.BLOCKS["balanced"] = catalog.Block("helpers.balanced_block:BalancedBlock")


LOCKSTEP = {"pipeline.schedule": "lockstep_1f1b"}
# With 12 rows in four microbatches two stages share three rows, and one of the second is padding.
CASES = {
    "tied": ("after", 3, {"model.tie_embeddings": True, "mesh.ici.fsdp": 2}),
    "padded_rows": (
        "after",
        1,
        {"model.block": "balanced", "model.dropout": 0.2, "data.global_batch_size": 12},
    ),
    "once": (
        "before",
        3,
        {
            "model.tie_embeddings": True,
            "mesh.ici.fsdp": 2,
            "mesh.ici.data": 2,
            "pipeline.fsdp_gather": "once",
        },
    ),
    "padded_rows_before": (
        "before",
        1,
        {
            "model.block": "balanced",
            "model.dropout": 0.2,
            "data.global_batch_size": 12,
            "pipeline.remat_policy": "minimal",
        },
    ),
    "split_backwards": (
        "before",
        5,
        {
            "pipeline.schedule": "lockstep_zb",
            "pipeline.remat_policy": "minimal",
            "pipeline.delay_activation_forwarding": True,
            "pipeline.layers_per_stage": [2, 1],
            "pipeline.fsdp_prefetch": "true",
            "pipeline.scan_layers_per_stage": False,
            "mesh.ici.fsdp": 2,
            "mesh.ici.tensor": 2,
        },
    ),
    "split_sequences": ("after", 2, {"mesh.ici.context": 2, "pipeline.skip_idle": "false"}),
}


@pytest.mark.parametrize(
    "case",
    [
        "once",
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "once"),
    ],
)
def test_gradients_with_layers_outside_the_pipeline_are_exact(case):
    place, num_outside, values = CASES[case]
    config = with_layers_outside(place, num_outside, **LOCKSTEP | values)
    rows = config.data.global_batch_size
    actual = EngineUnderTest(config, idle_fill=math.nan).train(make_batch(rows))
    assert_same(actual, reference(config.model, rows))


@pytest.mark.parametrize(
    ("place", "rows"), [("after", 10), pytest.param("before", 24, marks=pytest.mark.slow)]
)
def test_evaluate_with_layers_outside_the_pipeline_is_exact(place, rows):
    config = with_layers_outside(place, 1, **LOCKSTEP | {"model.dropout": 0.2})
    batch = make_batch(rows, seed=1)
    plain = {"pipeline.engine": "sequential", "model.num_layers": 5, "model.dropout": 0.2}
    expected = EngineUnderTest(tiny(**plain)).evaluate(batch)
    actual = EngineUnderTest(config, idle_fill=math.nan).evaluate(batch)
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 3, 1])
def test_each_stage_applies_the_layers_to_its_share_of_the_rows(rows):
    """Forward and backward equal those of all rows at once; rows of padding count nowhere."""
    stages, T, D = 4, 2, 3
    shapes = set()

    def apply(weights, x, inputs):
        shapes.add(x.shape)
        y = jnp.sin(x * weights["w"] + inputs.side.positions[..., None])
        return y, {"cosine": jnp.sum(jnp.cos(y + inputs.side.sequence_index[:, None, None]))}

    rng = np.random.default_rng(rows)
    x, dy = rng.standard_normal((2, rows, T, D)).astype(np.float32)
    weights = {"w": rng.standard_normal(D).astype(np.float32)}
    positions = np.arange(rows * T, dtype=np.int32).reshape(rows, T)
    side = SideInputs(positions, positions, np.arange(rows, dtype=np.int32) + 7)
    scale = jnp.float32(0.25)
    layers = ShardedLayers(apply)

    def run(weights, x, dy, side, scale):
        inputs = LayerInputs(side, None)
        y, aux = layers.forward(weights, x, inputs)
        only_first = jnp.where(lax.axis_index("stage") == 0, dy, jnp.nan)
        dx, dw = layers.gradients(weights, x, inputs, only_first, scale)
        return (
            y[None],
            psum(aux["cosine"], ("stage",)),
            dx[None],
            jax.tree.map(lambda g: psum(g, ("stage",)), dw),
        )

    devices = np.array(jax.devices()[:stages]).reshape(stages, *[1] * (len(MANUAL_AXES) - 1))
    by_stage, whole = PartitionSpec("stage"), PartitionSpec()
    y, aux, dx, dw = jax.shard_map(
        run,
        mesh=Mesh(devices, MANUAL_AXES),
        in_specs=(whole,) * 5,
        out_specs=(by_stage, whole, by_stage, whole),
        check_vma=False,
    )(weights, x, dy, side, scale)
    share = -(-rows // stages)
    assert shapes == {(share, T, D)} or (rows % stages and shapes == {(1, T, D)})
    expected, vjp = jax.vjp(lambda w, x: apply(w, x, LayerInputs(side, None)), weights, x)
    expected_dw, expected_dx = vjp((jnp.asarray(dy), {"cosine": scale}))
    np.testing.assert_allclose(aux, expected[1]["cosine"], rtol=1e-5)
    np.testing.assert_allclose(dw["w"], expected_dw["w"], rtol=1e-5)
    for stage in range(stages):
        np.testing.assert_allclose(y[stage], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dx[stage], expected_dx, rtol=1e-5, atol=1e-6)
