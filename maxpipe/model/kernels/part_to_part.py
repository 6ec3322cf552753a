"""Attend between two parts of a sequence with splash attention, for a ring of devices.

JAX's kernel returns logsumexps, but has no derivative then. Its backward is called by itself: all
that it takes from attention are output and logsumexps, and here these are those of all keys.

Letters: B sequences, P tokens of a part, H query heads, C channels.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from maxpipe.sharding.attention_contract import Attended, Keys, Queries

_Arrays: TypeAlias = tuple[jax.Array, ...]


class SplashPartToPart:
    """See `attention_contract.PartToPart`; in blocks of so many tokens, which divide a chunk."""

    def __init__(self, block: int, interpret: bool):
        self._block, self._interpret = block, interpret

    def forward(self, queries: Queries, keys: Keys, is_earlier: jax.Array | None) -> Attended:
        kernel = self._kernel(queries.q, is_earlier)

        def of_row(ids: splash.SegmentIds, *qkv: jax.Array) -> Attended:
            out, (logsumexp,) = kernel(*qkv, segment_ids=ids)
            return Attended(out, logsumexp)

        ids = splash.SegmentIds(queries.segments, keys.segments)
        return jax.vmap(of_row)(ids, queries.q, *keys[:2])

    def backward(
        self,
        queries: Queries,
        keys: Keys,
        attended: Attended,
        gradient: jax.Array,
        is_earlier: jax.Array | None,
    ) -> _Arrays:
        kernel = self._kernel(queries.q, is_earlier)

        def of_row(ids: splash.SegmentIds, gradient: jax.Array, *arrays: jax.Array) -> _Arrays:
            q, k, v, out, logsumexp = arrays
            saved = (q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
            # Gradients of three masks, of q, k and v, of segment ids and of sinks.
            return splash._splash_attention_bwd(res=saved, do=gradient, **kernel.kwargs)[3:6]

        ids = splash.SegmentIds(queries.segments, keys.segments)
        return jax.vmap(of_row)(ids, gradient, queries.q, *keys[:2], *attended)

    def _kernel(self, q: jax.Array, is_earlier: jax.Array | None) -> splash.SplashAttentionKernel:
        heads, length, b = *q.shape[1:3], self._block
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
            block_sizes=splash.BlockSizes(b, b, b, b, b, b, b, b),  # in all three kernels
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
            interpret=self._interpret,
        )
        if is_earlier is None:
            return kernel
        of_keys, of_queries = _whole_blocks(length // b, is_earlier)
        settings = kernel.kwargs | {"mask_function": None}
        return splash.SplashAttentionKernel(of_keys, of_keys, of_queries, **settings)


def _whole_blocks(count: int, is_earlier: jax.Array) -> list[MaskInfo]:
    """Return which of another part's blocks are seen; the kernel skips the others.

    First for kernels that read blocks of keys for each one of queries, then for those that do the
    reverse.
    """
    blocks = jnp.arange(count, dtype=jnp.int32)
    is_late = blocks >= count // 2
    seen = jnp.where(is_earlier, ~is_late, is_late[:, None])[None]  # [1, queries, keys]
    block_mask = jnp.where(seen, 2, 0).astype(jnp.int8)
    # In place of a block that is not seen, block 0 is read, once.
    read = (jnp.where(seen, each, 0) for each in (blocks, blocks[:, None]))
    return [MaskInfo(data_next, None, block_mask, None, None) for data_next in read]
