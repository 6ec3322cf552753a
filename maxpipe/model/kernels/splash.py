"""Attend with splash attention, JAX's block-sparse flash attention for TPUs.

No [T, T] matrix exists, and blocks that are masked entirely are skipped.

Letters: B sequences, T sequence, P queries of a part, H query heads, K key/value heads, C
channels of a query and key, V of a value.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import ModelConfig
from maxpipe.sharding.attention_contract import (
    PLAIN,
    AttentionFn,
    AttentionOptions,
    PartAttention,
    PartToPart,
)


class _AnyQueries(PartAttention, Protocol):
    """A `PartAttention` that may also take all queries."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        part: jax.Array | None,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array: ...


LANES = 128  # lanes of a TPU vector register; blocks are multiples of it


class Splash:
    """`jax.experimental.pallas.ops.tpu.splash_attention`, causal, with segment ids."""

    @staticmethod
    def unfit(config: ModelConfig, sequence_length: int, num_parts: int) -> str:
        unit = LANES if num_parts == 1 else LANES * 2 * num_parts
        if sequence_length % unit:
            why = f" = {LANES} x 2 x {num_parts} (mesh.*.context)" if num_parts > 1 else ""
            return f"data.sequence_length={sequence_length} is not a multiple of {unit}{why}"
        if config.head_dim % LANES and not config.is_latent:
            return f"model.head_dim={config.head_dim} is not a multiple of {LANES}"
        if config.attention_sinks:
            return "it has no sinks (model.attention_sinks)"
        return ""

    @staticmethod
    def build(config: ModelConfig, sequence_length: int, *, interpret: bool = False) -> AttentionFn:
        """Build attention of all queries; `interpret` runs the kernel on any backend, slowly."""
        all_tokens = np.arange(sequence_length, dtype=np.int32)[None]  # [1, T]
        attention = _build(config, all_tokens, sequence_length, interpret)

        def of_all(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segment_ids: jax.Array,
            options: AttentionOptions = PLAIN,
        ) -> jax.Array:
            return attention(q, k, v, segment_ids, None, options)

        return of_all

    @staticmethod
    def build_for_parts(
        config: ModelConfig, parts: np.ndarray, *, interpret: bool = False
    ) -> PartAttention:
        """Build attention of the queries of one part; `interpret` as in `build`."""
        # A block of queries must not reach from one chunk of a part into the other: fewer blocks
        # would be masked entirely.
        return _build(config, parts, parts.shape[1] // 2, interpret)

    @staticmethod
    def build_for_ring(config: ModelConfig, length: int, *, interpret: bool = False) -> PartToPart:
        """Build attention between parts of so many tokens; `interpret` as in `build`."""
        from maxpipe.model.kernels.part_to_part import SplashPartToPart

        # A block must not reach from one chunk of a part into the other.
        return SplashPartToPart(largest_block(length // 2, config.attention_block_size), interpret)


def _build(config: ModelConfig, parts: np.ndarray, chunk: int, interpret: bool) -> _AnyQueries:
    """Build a `PartAttention` that takes all queries if its part is None.

    Args:
      config: the model's section of the configuration.
      parts: int32 [C, P], the tokens of each part.
      chunk: number of tokens that blocks of queries have to divide.
      interpret: whether to run the kernel on any backend, slowly.
    """
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

    def masked(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        part: jax.Array | None,
        window: int,
        soft_cap: float,
    ) -> jax.Array:
        """Attend with a constant window; 0 sees all tokens."""
        mask = masks.LocalMask((T, T), (window - 1, 0), 0) if window else masks.CausalMask((T, T))
        mask.q_sequence = parts.reshape(-1)  # [C, P] -> [T]: the token that each query is
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=count,
            residual_checkpoint_name="context",
            attn_logits_soft_cap=soft_cap or None,
            interpret=interpret,
        )
        query_segments = segment_ids  # [B, T], or [B, P] of a part
        if part is not None:
            # The mask's arrays are [heads, blocks of queries, blocks of keys] and [queries]: take
            # the part's queries out of each.
            kernel = jax.tree.map(lambda a: _part(a, min(1, a.ndim - 1), part, count), kernel)
            query_segments = segment_ids[:, jnp.asarray(parts)[part]]

        return _attend_rows(kernel, q, k, v, splash.SegmentIds(query_segments, segment_ids))

    def attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        part: jax.Array | None,
        options: AttentionOptions = PLAIN,
    ) -> jax.Array:
        window, sinks, soft_cap = options
        assert sinks is None, "see `Splash.unfit`"
        if not isinstance(window, jax.Array):
            return masked(q, k, v, segment_ids, part, window or 0, soft_cap)
        # Masks are constants, so a window that differs by layer chooses between two kernels.
        local, of_all = (
            partial(masked, window=w, soft_cap=soft_cap) for w in (config.attention_window, 0)
        )
        is_local = window <= config.attention_window
        return jax.lax.cond(is_local, local, of_all, q, k, v, segment_ids, part)

    return attention


def _attend_rows(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Attend row by row: q [B,P,H,C], k [B,T,K,C], v [B,T,K,V], segment ids [B,P] and [B,T]."""

    def attend_row(
        q_PHC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        # The kernel takes heads first: [P, H, C] -> [H, P, C], and back.
        heads_first = (x.swapaxes(0, 1) for x in (q_PHC, k_TKC, v_TKC))
        return kernel(*heads_first, segment_ids=segments).swapaxes(0, 1)

    scaled = q / math.sqrt(q.shape[3])
    return jax.vmap(attend_row)(scaled, k, v, segment_ids)


def filled(channels: int) -> int:
    """Return how many channels matrix units compute with: the next multiple of `LANES`."""
    return -(-channels // LANES) * LANES


def _part(a: jax.Array, axis: int, part: jax.Array, count: int) -> jax.Array:
    """Return part `part` of `count` equal parts along an axis."""
    size = a.shape[axis] // count
    return jax.lax.dynamic_slice_in_dim(a, part * size, size, axis)


def largest_block(length: int, limit: int) -> int:
    """Return the largest multiple of `LANES` that divides `length` and is at most `limit`.

    A limit below `LANES` counts as `LANES`.
    """
    return max(b for b in range(LANES, max(limit, LANES) + 1, LANES) if length % b == 0)
