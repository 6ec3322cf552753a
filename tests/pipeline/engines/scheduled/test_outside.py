"""Layers outside the pipeline on the scheduled engine: each stage applies them to its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from maxpipe.model.layers import SideInputs
from maxpipe.pipeline.engines.scheduled.outside import LayerInputs, ShardedLayers
from maxpipe.pipeline.manual import MANUAL_AXES, psum


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
