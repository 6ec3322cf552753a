"""Gathers and sums over devices are each other's gradients, summed in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.sharding.collectives import CONTEXT_AXIS, EXPERT_AXIS, gathered, summed, swapped


def manual(f, axis, in_specs, out_specs, devices=8):
    mesh = Mesh(np.array(jax.devices()[:devices]), (axis,))
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


# 256 and seven or three times 1 are 256 in bfloat16, whose next number is 258.
@pytest.mark.parametrize(("devices", "total"), [(8, 264), (4, 260)])
def test_gathered_sums_gradients_in_float32(devices, total):
    scale = jnp.array([256, *[1] * (devices - 1)], jnp.bfloat16)

    def gradient(x, scale):
        def loss(x):
            return jnp.sum(gathered(x, CONTEXT_AXIS, 1) * scale[0]).astype(jnp.float32)

        return jax.grad(loss)(x)

    over = P(None, CONTEXT_AXIS)
    compute = manual(gradient, CONTEXT_AXIS, (over, P(CONTEXT_AXIS)), over, devices)
    actual = compute(jnp.ones((1, 16), jnp.bfloat16), scale)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, jnp.full((1, 16), total, jnp.bfloat16))


def test_summed_sums_in_float32_and_its_gradient_gathers():
    parts = jnp.broadcast_to(jnp.array([256, *[1] * 7], jnp.bfloat16)[:, None, None], (8, 8, 2))
    over = P(EXPERT_AXIS)
    along = partial(summed, axis_name=EXPERT_AXIS, dimension=0)
    total = manual(lambda x: along(x[0])[None], EXPERT_AXIS, over, over)(parts)
    np.testing.assert_array_equal(total, jnp.full((8, 1, 2), 264, jnp.bfloat16))

    def gradient(x, scale):
        return jax.grad(lambda x: jnp.sum(along(x[0]) * scale[0]))(x)

    scale = jnp.arange(8.0)
    actual = manual(gradient, EXPERT_AXIS, (over, over), over)(jnp.ones((8, 8, 2)), scale)
    np.testing.assert_array_equal(actual, np.broadcast_to(scale[None, :, None], (8, 8, 2)))


def test_swapped_transposes_devices_and_entries():
    x = jnp.arange(64).reshape(8, 8)
    over = P(EXPERT_AXIS)
    swap = manual(lambda x: swapped(x[0], EXPERT_AXIS)[None], EXPERT_AXIS, over, over)
    np.testing.assert_array_equal(swap(x), x.T)
