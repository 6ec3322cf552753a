"""Splash attention, JAX's block-sparse flash attention for TPUs: no [T, T] matrix, masked blocks skipped.

Letters: B sequences, T sequence, H query heads, K key/value heads, C head_dim.
"""

import math
from typing import Any

import jax

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn
from maxpipe.model.kernels import KERNELS

LANES = 128  # of a TPU vector register; blocks are multiples of it


@KERNELS.register()
class Splash:
    """`jax.experimental.pallas.ops.tpu.splash_attention`, causal, with segment ids."""

    platforms = ("tpu",)

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int) -> str:
        if sequence_length % LANES:
            return f"data.sequence_length={sequence_length} is not a multiple of {LANES}"
        if config.head_dim % LANES:
            return f"model.head_dim={config.head_dim} is not a multiple of {LANES}"
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int, *, interpret: bool = False) -> AttentionFn:
        """`interpret` runs the kernel on any backend, slowly."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        block = largest_block(sequence_length, config.attention_block_size)
        sizes = splash.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        )  # fmt: skip

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
            _, T, H, C = q.shape
            mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
            kernel = splash.make_splash_mha_single_device(
                mask, block_sizes=sizes, residual_checkpoint_name="context", interpret=interpret
            )

            def one(q_THC: Any, k_TKC: Any, v_TKC: Any, segments_T: Any) -> jax.Array:
                heads_first = (x.swapaxes(0, 1) for x in (q_THC, k_TKC, v_TKC))
                return kernel(*heads_first, segment_ids=splash.SegmentIds(segments_T, segments_T)).swapaxes(0, 1)

            return jax.vmap(one)(q / math.sqrt(C), k, v, segment_ids)

        return attention


def largest_block(length: int, limit: int) -> int:
    """Largest multiple of `LANES` that divides `length` and is at most `limit` (at least one lane block)."""
    return max(b for b in range(LANES, max(limit, LANES) + 1, LANES) if length % b == 0)
