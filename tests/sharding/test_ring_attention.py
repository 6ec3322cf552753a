"""Attention around a ring of devices compared with attention of full sequences."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compile_command import tpu_aot
from helpers.engines import tiny
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxpipe.compile.topology import devices_of
from maxpipe.config.catalog import KERNELS
from maxpipe.config.imports import implementation
from maxpipe.devices.mesh import build_mesh
from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.sharding.context_parallel import parts
from maxpipe.sharding.ring_attention import over_ring


def outputs_and_gradients(attention, weights, segments, *qkv):
    def loss(*qkv):
        y = attention(*qkv, segments)
        return jnp.sum(y * weights), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
    return y, *gradients


def check_ring(kernel, length, count, head_dim, borders, **options):
    """A ring of `count` devices has the outputs and gradients of one device, with documents."""
    rng = np.random.default_rng(0)
    *qkv, weights = (  # four query heads share two of keys
        jnp.asarray(rng.standard_normal((2, length, heads, head_dim)), jnp.float32)
        for heads in (4, 2, 2, 4)
    )
    # A row of one document, and one with these borders.
    segments = np.stack([np.ones(length), np.isin(np.arange(length), borders).cumsum()])
    segments = jnp.asarray(segments, jnp.int32)
    expected = outputs_and_gradients(dot_product_attention, weights, segments, *qkv)

    def placed(x):
        return x[:, parts(length, count).reshape(-1)]

    build = implementation(KERNELS[kernel]).build_for_ring
    attention = over_ring(build(tiny().model, length // count, **options))
    mesh, over = Mesh(np.array(jax.devices()[:count]), ("context",)), P(None, "context")
    specs = {"mesh": mesh, "in_specs": (over,) * 5, "out_specs": (over,) * 4}
    run = jax.shard_map(partial(outputs_and_gradients, attention), **specs, check_vma=False)
    actual = jax.jit(run)(*map(placed, (weights, segments, *qkv)))
    for a, b in zip(actual, expected, strict=True):
        assert jnp.max(jnp.abs(a - placed(b))) <= 1e-5 * jnp.max(jnp.abs(b))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_dot_product_around_a_ring_equals_the_full_sequence(count):
    chunk = 24 // (2 * count)
    # On a border of chunks, within a chunk, and between the last and the first token of devices.
    check_ring("dot_product", 24, count, 4, borders=[chunk, chunk + 1, 24 - chunk])


def test_splash_around_a_ring_equals_dot_product_of_the_full_sequence():
    """Interpreted; a chunk is one block, and a device skips half of the blocks of each step."""
    check_ring("splash", 512, 2, 128, borders=[128, 300, 384], interpret=True)


class TestTpu:
    pytestmark = tpu_aot

    def test_ring_compiles_and_its_transfers_are_asynchronous(self):
        config = tiny(**{"mesh.ici.context": 4, "compile.topology": "v5p:2x2x1"})
        attention = over_ring(implementation(KERNELS["splash"]).build_for_ring(config.model, 256))
        mesh = build_mesh(config, devices_of(config))
        spec = P(None, "context")

        def loss(*operands):
            return jnp.sum(attention(*operands).astype(jnp.float32))

        gradients = jax.shard_map(
            jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        shapes = [((1, 1024, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
        operands = [
            jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
            for shape in (*shapes, ((1, 1024), jnp.int32))
        ]
        text = jax.jit(gradients).lower(*operands).compile().as_text()
        assert "collective-permute-start" in text
        assert "all-gather" not in text
        assert {*re.findall(r"splash_mha_(fwd|dq|dkv)", text)} == {"fwd", "dq", "dkv"}
