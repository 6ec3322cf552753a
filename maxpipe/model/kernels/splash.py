"""Splash attention, JAX's block-sparse flash attention for TPUs: no [T, T] matrix, masked blocks skipped.

Letters: B sequences, T sequence, P queries of a part, H query heads, K key/value heads, C head_dim.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import ModelConfig
from maxpipe.model.attention import AttentionFn
from maxpipe.sharding.context_parallel import PartAttention

LANES = 128  # of a TPU vector register; blocks are multiples of it


class Splash:
    """`jax.experimental.pallas.ops.tpu.splash_attention`, causal, with segment ids."""

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        unit = LANES if num_parts == 1 else LANES * 2 * num_parts
        if sequence_length % unit:
            why = f" = {LANES} x 2 x {num_parts} (mesh.*.context)" if num_parts > 1 else ""
            return f"data.sequence_length={sequence_length} is not a multiple of {unit}{why}"
        if config.head_dim % LANES:
            return f"model.head_dim={config.head_dim} is not a multiple of {LANES}"
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int, *, interpret: bool = False) -> AttentionFn:
        """`interpret` runs the kernel on any backend, slowly."""
        whole = np.arange(sequence_length, dtype=np.int32)[None]
        attention = _build(config, whole, sequence_length, interpret)
        return lambda q, k, v, segment_ids: attention(q, k, v, segment_ids, None)

    @staticmethod
    def build_engine_inputs(
        config: ModelConfig, parts: np.ndarray, *, interpret: bool = False
    ) -> PartAttention:
        """`interpret` as in `build`."""
        # A block of queries must not reach from one chunk of a part into the other: fewer would be
        # masked whole.
        return _build(config, parts, parts.shape[1] // 2, interpret)


def _build(
    config: ModelConfig, parts: np.ndarray, chunk: int, interpret: bool
) -> Callable[..., jax.Array]:
    """A `PartAttention`, or with None as the last argument one of all queries; blocks of queries divide `chunk`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    count, T = len(parts), parts.size
    block_q, block = (largest_block(n, config.attention_block_size) for n in (chunk, T))
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block_q,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block_q,
        block_kv_dq=block,
    )

    def attention(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, part: jax.Array | None
    ) -> jax.Array:
        causal = masks.CausalMask((T, T))
        causal.q_sequence = parts.reshape(-1)
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([causal] * q.shape[2]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=count,
            residual_checkpoint_name="context",
            interpret=interpret,
        )
        of_queries = segment_ids
        if part is not None:
            # Arrays of the mask: [heads, blocks of queries, blocks of keys] and [queries].
            kernel = jax.tree.map(lambda a: _part(a, min(1, a.ndim - 1), part, count), kernel)
            of_queries = segment_ids[:, jnp.asarray(parts)[part]]

        def one(q_PHC: Any, k_TKC: Any, v_TKC: Any, segments_P: Any, segments_T: Any) -> jax.Array:
            heads_first = (x.swapaxes(0, 1) for x in (q_PHC, k_TKC, v_TKC))
            return kernel(
                *heads_first, segment_ids=splash.SegmentIds(segments_P, segments_T)
            ).swapaxes(0, 1)

        return jax.vmap(one)(q / math.sqrt(q.shape[3]), k, v, of_queries, segment_ids)

    return attention


def _part(a: jax.Array, axis: int, part: jax.Array, count: int) -> jax.Array:
    size = a.shape[axis] // count
    return jax.lax.dynamic_slice_in_dim(a, part * size, size, axis)


def largest_block(length: int, limit: int) -> int:
    """Largest multiple of `LANES` that divides `length` and is at most `limit` (at least one lane block)."""
    return max(b for b in range(LANES, max(limit, LANES) + 1, LANES) if length % b == 0)
