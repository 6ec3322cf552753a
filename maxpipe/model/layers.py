"""RMS normalisation.

Products of activations with weights.

Gated MLP (SwiGLU, Shazeer 2020). Shapes: B batch, T sequence, D embed, F hidden.

Rotary position embedding (Su et al. 2021), with the Llama-3 scaling of frequencies.

Dropout whose mask depends on (key, sequence, token) only, so that no layout of devices changes
it."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config.sections import ModelConfig, RopeScalingConfig
from maxpipe.model.parameters import declare


class SideInputs(NamedTuple):
    """What a layer reads besides activations and weights; the arrays of one microbatch never change between layers.

    Attributes:
      positions: int32 [B, T], position of each token in its segment.
      segment_ids: int32 [B, T], which of a row's packed segments each token belongs to.
      sequence_index: int32 [B], index of each row in the global batch, from which dropout masks are
        drawn.
    """

    positions: jax.Array
    segment_ids: jax.Array
    sequence_index: jax.Array


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019), computed in float32."""

    def __init__(self, dim: int, *, eps: float, dtype: Any, axis: str = "norm"):
        self.eps = eps
        self.scale = declare((dim,), (axis,), dtype, fill=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., dim] -> the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(x: jax.Array, weight: jax.Array, contracted: int = 1, dtype: Any = None) -> jax.Array:
    """Sums over the last dimensions of `x` and the first of `weight`. Without forward-mode derivatives.

    The gradient for the weight is the product of `x` with the cotangent, in that order. JAX's own
    rule takes the cotangent first and transposes the product: XLA's CPU backend then makes a
    transposed copy of the cotangent, and behind an activation function computes its derivative anew
    for that, against the grain of the memory.

    Args:
      x: [..., *C], where C are the `contracted` dimensions.
      weight: [*C, *K], in the dtype of `x`.
      contracted: how many dimensions are summed over.
      dtype: of the result, and of gradients until all their sums are made; that of `x` if None.
        Cotangents are first rounded to the dtype of `x`.

    Returns:
      [..., *K].
    """
    kept = x.ndim - contracted
    return _dot(x, weight, range(kept, x.ndim), range(contracted), dtype)


def _forward(x: jax.Array, weight: jax.Array, contracted: int, dtype: Any) -> Any:
    return project(x, weight, contracted, dtype), (x, weight)


def _backward(
    contracted: int, dtype: Any, operands: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent = cotangent.astype(x.dtype)
    kept = range(x.ndim - contracted)
    dx = _dot(
        cotangent, weight, range(len(kept), cotangent.ndim), range(contracted, weight.ndim), dtype
    )
    return dx.astype(x.dtype), _dot(x, cotangent, kept, kept, dtype).astype(weight.dtype)


project.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, of_a: range, of_b: range, dtype: Any = None) -> jax.Array:
    return lax.dot_general(
        a, b, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=dtype
    )


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        std, out_std = 1 / math.sqrt(D), 1 / math.sqrt(F * 2 * config.num_layers)
        self.gate = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.up = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.down = declare((F, D), ("mlp", "embed"), dtype, stddev=out_std)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B,T,D] -> [B,T,D]."""
        gate = checkpoint_name(project(x_BTD, self.gate[...]), "mlp_gate")
        up = checkpoint_name(project(x_BTD, self.up[...]), "mlp_up")
        hidden = jax.nn.silu(gate) * up
        return checkpoint_name(project(hidden, self.down[...]), "mlp_down")


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Angular frequencies, float32 [head_dim / 2].

    With `scaling.factor` > 1, wavelengths above original/low_freq_factor are stretched by the
    factor, those below original/high_freq_factor are kept, and those between are interpolated
    (Llama 3.1 model card).
    """
    freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.factor > 1:
        turns = scaling.original_max_position * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        freq = freq * (keep + (1 - keep) / scaling.factor)
    return freq.astype(np.float32)


def rotate(x_BTHD: jax.Array, positions_BT: jax.Array, freq: np.ndarray) -> jax.Array:
    """Rotates pairs (d, d + D/2) by positions * freq.

    Args:
      x_BTHD: [batch, sequence, heads, head_dim], any float dtype; kept.
      positions_BT: int32 [batch, sequence].
      freq: float32 [head_dim / 2].
    """
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * freq
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHD.dtype)


def dropout(x_BTD: jax.Array, rate: float, key: jax.Array, side: SideInputs) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
      x_BTD: [batch, tokens, embed].
      rate: in [0, 1).
      key: key of the step, layer and sublayer.
      side: sequence_index tells rows apart; segment_ids and positions tell the tokens of a row
        apart, in whatever order they are stored.
    """

    def keep_token(key: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, segment), position)
        return jax.random.bernoulli(key, 1 - rate, x_BTD.shape[2:])

    def keep(sequence: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return jax.vmap(keep_token, (None, 0, 0))(
            jax.random.fold_in(key, sequence), segments, positions
        )

    mask = jax.vmap(keep)(side.sequence_index, side.segment_ids, side.positions)
    return jnp.where(mask, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
