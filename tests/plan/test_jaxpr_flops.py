"""FLOPs counted on jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.builder import build_trainer
from maxpipe.compile.step import compile_step
from maxpipe.plan.flops import model_flops_per_token
from maxpipe.plan.jaxpr_flops import program_flops

A = jax.ShapeDtypeStruct((4, 8), jnp.float32)
B = jax.ShapeDtypeStruct((8, 16), jnp.float32)
PRODUCT = 2 * 4 * 8 * 16


def test_matrix_products_in_loops():
    def f(a, b):
        return jax.lax.scan(lambda total, _: (total + jnp.sum(a @ b), None), 0.0, length=7)[0]

    assert program_flops(jax.make_jaxpr(f)(A, B)) == 7 * PRODUCT


def test_the_dearer_branch_counts_as_often_as_the_caller_says():
    def f(p, a, b):
        return jax.lax.cond(p, lambda: a @ b, lambda: jnp.zeros((4, 16)))

    jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((), jnp.bool_), A, B)
    assert program_flops(jaxpr) == PRODUCT
    assert program_flops(jaxpr, lambda runs: runs / 2) == PRODUCT / 2


def test_a_conditional_on_every_device_counts_the_runs_of_one():
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("stage",))

    def tick(total, p):
        return total + jax.lax.cond(
            p, lambda: jnp.sum(jnp.ones(A.shape) @ jnp.ones(B.shape)), lambda: 0.0
        ), None

    def f(ps):
        scan = jax.shard_map(
            lambda ps: jax.lax.scan(tick, 0.0, ps)[0],
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return scan(ps)

    assert (
        program_flops(jax.make_jaxpr(f)(jnp.ones(7, bool)), lambda runs: min(runs, 5))
        == 8 * 5 * PRODUCT
    )


@pytest.mark.parametrize(
    ("blocks", "window", "share"),
    [
        ((128, 128), 0, (1 + 2 + 3 + 4) / 16),
        ((128, 256), 0, (1 + 1 + 2 + 2) / 8),
        ((256, 128), 0, (2 + 4) / 8),
        ((128, 128), 128, 2 / 4),  # the block on the diagonal and the one before it
    ],
)
def test_attention_kernels_count_the_blocks_that_their_mask_leaves(blocks, window, share):
    """In the forward a query meets a key in two products, in the backward in seven."""
    rows, heads, length, width = 2, 3, 512, 128
    query, key = blocks
    shape = length, length
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=query,
            block_kv=key,
            block_kv_compute=key,
            block_q_dkv=query,
            block_kv_dkv=key,
            block_kv_dkv_compute=key,
            block_q_dq=query,
            block_kv_dq=key,
        ),
        head_shards=1,
        q_seq_shards=1,
    )
    x = jax.ShapeDtypeStruct((rows, heads, length, width), jnp.bfloat16)
    gradient = jax.grad(lambda q, k, v: jnp.sum(jax.vmap(kernel)(q, k, v)), argnums=(0, 1, 2))
    all_pairs = 2 * rows * heads * length**2 * width
    counted = program_flops(jax.make_jaxpr(gradient)(x, x, x))
    assert counted == pytest.approx((2 + 7) * share * all_pairs, rel=0.001)


def test_a_step_without_recomputation_runs_the_models_flops():
    words = "num_layers=2 embed_dim=32 mlp_dim=64 global_batch_size=4 remat_policy=none"
    config = tiny(words)
    mesh = make_mesh(config)
    step = compile_step(config, mesh, build_trainer(config, mesh), print)
    model = 4 * 8 * model_flops_per_token(config.model, 8)
    # The head is always computed again, and attention is not halved by its mask.
    assert 1.0 < program_flops(step.jaxpr) / model < 1.25
