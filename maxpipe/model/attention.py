"""Define the attention sublayer: grouped queries, causal within a packed sequence's segments.

Shapes: B batch, T sequence, D embed, H query heads, K key/value heads, C head_dim.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig
from maxpipe.model.layer_facts import ALL_TOKENS, LayerTable, layer_table
from maxpipe.model.layers import DropFn, RMSNorm, adapted, add_adapters, projection
from maxpipe.model.parameters import declare
from maxpipe.model.rope import score_factor
from maxpipe.sharding.attention_contract import AttentionFn, AttentionOptions


class LayerFacts(NamedTuple):
    """What one layer knows besides its parameters; arrays where layers differ.

    Attributes:
      window: tokens that a query sees, int32 scalar; None if all layers see all.
      frequencies: frequencies of the rotation, float32 [R / 2]; zeros in a layer without one.
      factor: factor of rotated queries and keys, float32 scalar.
    """

    window: int | jax.Array | None
    frequencies: np.ndarray | jax.Array
    factor: float | jax.Array


class Attention(nnx.Module):
    """Project, normalise queries and keys if configured, rotate, attend, and project the output."""

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        D, H, K, C = config.embed_dim, config.num_query_heads, config.num_kv_heads, config.head_dim
        self.attention = attention
        self.multiply = projection(config)
        self.table = layer_table(config)
        self.interleaved = config.rope_interleaved
        self.rotates_by_product = config.rotation == "product"
        self.soft_cap = config.attention_soft_cap
        self.query_scale = query_factor(config)
        dtype, std = config.param_dtype, 1 / math.sqrt(D)
        self.query = declare((D, H, C), ("embed", "heads", "head_dim"), dtype, stddev=std)
        self.key = declare((D, K, C), ("embed", "kv_heads", "head_dim"), dtype, stddev=std)
        self.value = declare((D, K, C), ("embed", "kv_heads", "head_dim"), dtype, stddev=std)
        # Sublayer outputs start small so that the residual stream's variance does not grow with
        # depth (GPT-2).
        out_std = 1 / math.sqrt(H * C * 2 * config.num_layers)
        self.out = declare((H, C, D), ("heads", "head_dim", "embed"), dtype, stddev=out_std)
        self.has_bias = config.attention_bias
        if config.attention_bias:
            self.query_bias = declare((H, C), ("heads", "head_dim"), dtype)
            self.key_bias = declare((K, C), ("kv_heads", "head_dim"), dtype)
            self.value_bias = declare((K, C), ("kv_heads", "head_dim"), dtype)
        self.has_output_bias = config.attention_output_bias
        if config.attention_output_bias:
            self.out_bias = declare((D,), ("norm",), dtype)
        self.has_sinks = config.attention_sinks
        if config.attention_sinks:
            self.sinks = declare((H,), ("heads",), dtype)
        self.has_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm, self.key_norm = (_head_norm(config, heads) for heads in ("", "kv_"))
        add_adapters(self, config, {"query": 1, "key": 1, "value": 1, "out": 2})

    def project(
        self,
        x_BTD: jax.Array,
        positions: jax.Array,
        facts: LayerFacts,
        drop: DropFn | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query [B,T,H,C], key and value [B,T,K,C]; query and key are rotated."""
        q, k, v = (
            adapted(self, name, x_BTD, 1, drop, multiply=self.multiply)
            for name in ("query", "key", "value")
        )
        if self.has_bias:
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        q = checkpoint_name(q, "query_proj")
        k = checkpoint_name(k, "key_proj")
        v = checkpoint_name(v, "value_proj")
        if self.has_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.table.is_rotated:
            q, k = (
                rotate(
                    x,
                    positions,
                    facts.frequencies,
                    facts.factor,
                    interleaved=self.interleaved,
                    by_product=self.rotates_by_product,
                )
                for x in (q, k)
            )
        return q if self.query_scale == 1 else q * self.query_scale, k, v

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        layer_index: jax.Array | None = None,
        drop: DropFn | None = None,
    ) -> jax.Array:
        """Apply the sublayer.

        Args:
          x_BTD: activations [B,T,D].
          positions, segment_ids: int32 [B,T].
          layer_index: as in `SideInputs`; needed where layers differ.
          drop: dropout on the inputs of adapters; None without.
        """
        facts = look_up(self.table, layer_index)
        q, k, v = self.project(x_BTD, positions, facts, drop)
        sinks = self.sinks[...] if self.has_sinks else None
        options = AttentionOptions(facts.window, sinks, self.soft_cap)
        context = checkpoint_name(self.attention(q, k, v, segment_ids, options), "context")
        y = adapted(self, "out", context, 2, drop, multiply=self.multiply)
        if self.has_output_bias:
            y = y + self.out_bias[...]
        return checkpoint_name(y, "out_proj")


def query_factor(config: ModelConfig) -> float:
    """Return the factor of queries that gives scores their scale; kernels divide by sqrt(C)."""
    scale = config.query_scale * math.sqrt(config.head_dim) if config.query_scale else 1.0
    return scale * score_factor(config.rope_scaling)


def look_up(table: LayerTable, layer_index: jax.Array | None) -> LayerFacts:
    """Return the facts of the layer with this index in model order, int32 scalar.

    Only what differs between layers is looked up; without such facts the index is not read. The
    index of a padding layer is the number of layers.
    """
    kind = None
    if len(table.windows) > 1:
        assert layer_index is not None, "layers differ: pass SideInputs.layer_index"
        kind = jnp.asarray([*table.kinds, table.kinds[-1]], jnp.int32)[layer_index]
    window: int | jax.Array | None = table.windows[0]
    if kind is not None and len({*table.windows}) > 1:
        window = jnp.asarray(table.windows, jnp.int32)[kind]
    elif table.windows[0] == ALL_TOKENS:
        window = None
    rotation: np.ndarray | jax.Array = np.asarray(table.rotations[0], np.float32)
    if kind is not None and len({*table.rotations}) > 1:
        rotation = jnp.asarray(table.rotations, jnp.float32)[kind]
    factor: float | jax.Array = table.factors[0]
    if kind is not None and len({*table.factors}) > 1:
        factor = jnp.asarray(table.factors, jnp.float32)[kind]
    return LayerFacts(window, rotation, factor)


def rotate(
    x_BTHC: jax.Array,
    positions_BT: jax.Array,
    freq: np.ndarray | jax.Array,
    factor: float | jax.Array = 1.0,
    *,
    interleaved: bool = False,
    by_product: bool = False,
) -> jax.Array:
    """Rotate pairs of the first R channels of every head by positions * freq (Su et al. 2021).

    Args:
      x_BTHC: queries or keys [B, T, H, C] of any float dtype, which the result has too.
      positions_BT: int32 [B, T].
      freq: float32 [R / 2], R <= C; channels from R on stay unchanged.
      factor: multiplies the rotated channels.
      interleaved: rotate the pairs (2i, 2i + 1) instead of (i, i + R/2).
      by_product: find the other channel of each pair with a product, not slices; the result has
        the same bits.
    """
    if by_product:
        return _rotate_by_product(x_BTHC, positions_BT, freq, factor, interleaved)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * freq  # [B, T, 1, R/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if not isinstance(factor, float) or factor != 1:
        sin, cos = sin * factor, cos * factor
    x, rotated_dim = x_BTHC.astype(jnp.float32), 2 * freq.shape[-1]
    is_partial = rotated_dim < x.shape[-1]
    turned = x[..., :rotated_dim] if is_partial else x
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]  # [B, T, H, R/2] each
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    pairs = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        rotated = jnp.stack(pairs, axis=-1).reshape(turned.shape)  # [B, T, H, R/2, 2] -> [..., R]
    else:
        rotated = jnp.concatenate(pairs, axis=-1)
    if is_partial:
        rotated = jnp.concatenate([rotated, x[..., rotated_dim:]], axis=-1)
    return rotated.astype(x_BTHC.dtype)


def _rotate_by_product(
    x_BTHC: jax.Array,
    positions_BT: jax.Array,
    freq: np.ndarray | jax.Array,
    factor: float | jax.Array,
    interleaved: bool,
) -> jax.Array:
    """Compute `rotate` without slices of a head's channels.

    TPUs hold 128 channels in the lanes of a register. Slices of 64 make XLA transpose queries and
    keys; a product with a signed permutation does not, and it is exact.
    """
    head_dim, rotated_dim = x_BTHC.shape[-1], 2 * freq.shape[-1]
    first, second = _pairs(rotated_dim, interleaved)
    pair = np.zeros(head_dim, np.int32)  # the pair of each channel
    pair[first] = pair[second] = np.arange(rotated_dim // 2)
    is_rotated = np.arange(head_dim) < rotated_dim
    of_channel = jnp.where(is_rotated, jnp.asarray(freq)[pair], 0)  # [C]
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * of_channel  # [B, T, 1, C]
    factors = jnp.where(is_rotated, factor, 1.0)  # [C]
    turn = partial(_turn, rotated_dim, interleaved)
    return turn(x_BTHC, jnp.sin(angle) * factors, jnp.cos(angle) * factors)


def _pairs(rotated_dim: int, interleaved: bool) -> np.ndarray:
    """Return the channels of all pairs, int [2, rotated_dim / 2]."""
    channels = np.arange(rotated_dim)
    return channels.reshape(-1, 2).T if interleaved else channels.reshape(2, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _turn(
    rotated_dim: int, interleaved: bool, x_BTHC: jax.Array, sin: jax.Array, cos: jax.Array
) -> jax.Array:
    """Return x * cos + partner(x) * sin in the dtype of x; sin and cos are float32 [B, T, 1, C].

    The derivative is this function with the opposite angle, so both products have operands in the
    dtype of x and do not round them.
    """
    first, second = _pairs(rotated_dim, interleaved)
    partner = np.zeros((x_BTHC.shape[-1],) * 2)
    partner[second, first], partner[first, second] = -1, 1
    other = jnp.einsum(
        "bthc,cd->bthd",
        x_BTHC,
        jnp.asarray(partner, x_BTHC.dtype),
        precision=jax.lax.Precision.HIGHEST,  # exact for float32 too
        preferred_element_type=jnp.float32,
    )
    return (x_BTHC.astype(jnp.float32) * cos + other * sin).astype(x_BTHC.dtype)


def _turn_forward(
    rotated_dim: int, interleaved: bool, x_BTHC: jax.Array, sin: jax.Array, cos: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _turn(rotated_dim, interleaved, x_BTHC, sin, cos), (sin, cos)


def _turn_backward(
    rotated_dim: int,
    interleaved: bool,
    angles: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, None, None]:
    sin, cos = angles
    return _turn(rotated_dim, interleaved, cotangent, -sin, cos), None, None


_turn.defvjp(_turn_forward, _turn_backward)


def _head_norm(config: ModelConfig, prefix: str) -> RMSNorm:
    """Return the norm of queries (prefix "") or of keys ("kv_"): over each head, or over all."""
    shape: tuple[int, ...] = (config.head_dim,)
    axes: tuple[str, ...] = ("norm",)
    if config.qk_norm_scope == "full":
        heads = config.num_kv_heads if prefix else config.num_query_heads
        shape, axes = (heads, config.head_dim), (f"{prefix}heads", "head_dim")
    return RMSNorm(
        *shape,
        eps=config.norm_eps,
        dtype=config.param_dtype,
        axes=axes,
        offset=config.norm_offset,
    )
