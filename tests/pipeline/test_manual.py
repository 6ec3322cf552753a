"""Collectives inside `shard_map`: gathered weights, summed gradients, the ring, their order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.manual import manual, mesh_of, random
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.pipeline.manual import (
    MANUAL_AXES,
    Gather,
    after,
    gather_tree,
    psum,
    ring,
    sum_replicas,
)

P = PartitionSpec
SPECS = [P(), P("fsdp"), P(None, ("stage", "fsdp")), P(("fsdp", "data"), "stage")]
SPECS += [P("tensor", "fsdp")]


@pytest.mark.parametrize("num_leading", [0, 2])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gather_and_scatter_of_any_spec_are_copies_and_sums(spec, num_leading):
    """`scatter` sums over the devices of an axis; each keeps its shard of the parameter."""
    gather = Gather(spec, jnp.float32, jnp.float32)
    whole = P(*[None] * num_leading, *[None if entry == "tensor" else entry for entry in spec])
    leading = (3, 2)[:num_leading]
    weight, scales = random(*leading, 8, 8), np.arange(1, 9, dtype=np.float32)

    def f(shard, scale):
        full = gather.gather(shard, (None,) * num_leading)
        sums = gather.scatter(full * scale[0], (None,) * num_leading)
        return full, sum_replicas(gather, sums, MANUAL_AXES)

    sizes = {"data": 2, "fsdp": 2} | ({"tensor": 2} if "tensor" in spec else {"stage": 2})
    num_manual = 4 if "tensor" in spec else 8
    full, total = manual(f, (whole, P(MANUAL_AXES)), (P(), whole), **sizes)(
        weight, scales[:num_manual]
    )
    np.testing.assert_array_equal(full, weight)
    np.testing.assert_allclose(total, weight * scales[:num_manual].sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "sizes", "transfers"),
    [
        (P("fsdp"), {"fsdp": 2}, (1, 1)),
        (P(None, "fsdp"), {"fsdp": 3}, (2, 4)),
        (P("fsdp"), {"fsdp": 4}, (3, 6)),
        (P(("stage", "fsdp"), "data"), {"stage": 2, "fsdp": 2, "data": 2}, (3, 3)),
    ],
    ids=str,
)
def test_gather_and_scatter_in_steps_are_copies_and_sums(spec, sizes, transfers):
    """Sums of three and more devices go around in both directions, half of each part in either."""
    gather = Gather(spec, jnp.float32, jnp.float32)
    weight, scales = random(12, 12), np.arange(1, 9, dtype=np.float32)[: math.prod(sizes.values())]

    def in_steps(shard, scale):
        full = gather.gather_in_steps(shard)
        return full, gather.scatter_in_steps(full * scale[0])

    f = manual(in_steps, (spec, P(MANUAL_AXES)), (P(), spec), **sizes)
    full, total = f(weight, scales)
    np.testing.assert_array_equal(full, weight)
    np.testing.assert_allclose(total, weight * scales.sum(), rtol=1e-6)
    sent = str(jax.make_jaxpr(f)(weight, scales)).count("ppermute[")
    assert sent == sum(transfers)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_scatter_in_steps_of_bfloat16_sums_in_float32(size):
    """One large and many small gradients: bfloat16 sums would lose the small ones."""
    gather = Gather(P("fsdp"), jnp.float32, jnp.bfloat16)
    values = np.array([256] + [1] * (size - 1), np.float32)

    def f(value):
        return gather.scatter_in_steps(jnp.full((16, 2), value[0], jnp.bfloat16))

    sums = manual(f, P("fsdp"), P("fsdp"), fsdp=size)(values)
    assert sums.dtype == jnp.float32
    np.testing.assert_array_equal(sums, np.full((16, 2), 255 + size, np.float32))


@pytest.mark.parametrize("name", ["gather", "gather_in_steps"])
def test_gather_of_integers_keeps_their_dtype(name):
    gather, values = (
        getattr(Gather(P("fsdp"), jnp.int32, jnp.bfloat16), name),
        np.arange(1000, 1004),
    )
    full = manual(gather, P("fsdp"), P(), fsdp=4)(values)
    assert full.dtype == jnp.int32
    np.testing.assert_array_equal(full, values)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_gather_in_bfloat16_sums_gradients_in_float32(param_dtype):
    """One large and many small gradients: bfloat16 sums would lose the small ones."""
    gather = Gather(P("fsdp"), param_dtype, jnp.bfloat16)
    weight, values = np.ones((8, 2), param_dtype), np.array([256] + [1] * 7, np.float32)

    def f(shard, value):
        def loss(tree):
            weight = gather_tree({"w": gather}, tree)["w"]
            return jnp.sum(weight.astype(jnp.float32) * value[0])

        assert gather(shard).dtype == jnp.bfloat16
        return jax.grad(loss)({"w": shard})["w"]

    gradient = manual(f, (P("fsdp"), P("fsdp")), P("fsdp"), fsdp=8)(weight, values)
    assert gradient.dtype == jnp.dtype(param_dtype)
    np.testing.assert_array_equal(gradient, np.full((8, 2), 263, np.float32).astype(param_dtype))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shift", [1, -1])
def test_ring_of_stages_rolls_the_stage_axis(size, shift):
    """Each device of another axis is in a ring of its own."""
    values, spec = np.arange(size * 2, dtype=np.float32).reshape(size, 2), P("stage", "data")
    moved = manual(lambda x: ring(x, size, shift), spec, spec, stage=size, data=2)(values)
    np.testing.assert_array_equal(moved, np.roll(values, shift, axis=0))


def test_psum_over_axes_of_one_device_next_to_an_automatic_axis_compiles():
    """XLA's partitioner refuses `lax.psum` of what it has split."""
    x = random(4, 6)
    split = jax.device_put(x, NamedSharding(mesh_of(tensor=2), P("tensor")))
    total = manual(lambda x: psum(x @ x.T, MANUAL_AXES), P(), P(), tensor=2)(split)
    np.testing.assert_allclose(total, x @ x.T, rtol=1e-5)


def test_after_any_earlier_values_keeps_every_bit():
    values = {
        "float": jnp.array([-0.0, jnp.nan, jnp.inf, 1.5]),
        "index": jnp.int32(7),
        "flag": jnp.array(True),
    }
    for earlier in (jnp.nan, jnp.inf, -1.0, 0.0, 2.0):
        result = jax.jit(after)(values, jnp.full((2, 3), earlier), [None, jnp.zeros((0,))])
        for name, value in values.items():
            assert np.asarray(result[name]).tobytes() == np.asarray(value).tobytes()
            assert result[name].dtype == value.dtype
    x = jnp.ones(3)
    assert after(x, None, []) is x


def test_after_compiled_leaves_a_dependency():
    """XLA sees through a barrier, but must not see through this."""

    def compiled(f):
        return jax.jit(f).lower(jnp.ones(3), jnp.ones(3)).compile().as_text()

    assert "sine" in compiled(lambda x, earlier: after(x, jnp.sin(earlier)))
    assert "sine" not in compiled(
        lambda x, earlier: jax.lax.optimization_barrier((x, jnp.sin(earlier)))[0]
    )
