"""Define what a decoder block is made of: projection, norm, rotation, gated MLP and dropout.

Shapes: B batch, T sequence, D embed, H heads, C head_dim, F hidden width of the MLP.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxpipe.config.sections import ModelConfig, RopeScalingConfig
from maxpipe.model.parameters import declare


class SideInputs(NamedTuple):
    """What every layer reads besides activations and weights.

    Attributes:
      positions: int32 [B, T], position of each token in its segment.
      segment_ids: int32 [B, T], which of a row's packed segments each token belongs to.
      sequence_index: int32 [B], index of each row in the global batch, from which dropout masks are
        drawn.
    """

    positions: jax.Array
    segment_ids: jax.Array
    sequence_index: jax.Array


# ------------------------------------------------------------------------------------------------
# Projection
# ------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(
    x: jax.Array, weight: jax.Array, contracted: int = 1, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiply activations with a weight, summing over the last dimensions of `x`.

    The gradient of the weight is the product of `x` with the cotangent, in that order. JAX's own
    rule takes the cotangent first and transposes the product. For that XLA's CPU backend copies the
    cotangent transposed; after an activation function it computes the derivative again for the
    copy, across the order of memory. There are no forward-mode derivatives.

    Args:
      x: [..., *C], where C are the `contracted` dimensions.
      weight: [*C, *K], in the dtype of `x`.
      contracted: number of dimensions that are summed over.
      dtype: of the result, and of gradients until they are summed; that of `x` if None. Cotangents
        are first rounded to the dtype of `x`.

    Returns:
      [..., *K].
    """
    num_batch = x.ndim - contracted
    return _dot(x, weight, range(num_batch, x.ndim), range(contracted), dtype)


def _project_forward(
    x: jax.Array, weight: jax.Array, contracted: int, dtype: DTypeLike | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project(x, weight, contracted, dtype), (x, weight)


def _project_backward(
    contracted: int,
    dtype: DTypeLike | None,
    operands: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent = cotangent.astype(x.dtype)
    batch = range(x.ndim - contracted)
    outputs = range(len(batch), cotangent.ndim)
    dx = _dot(cotangent, weight, outputs, range(contracted, weight.ndim), dtype)
    return dx.astype(x.dtype), _dot(x, cotangent, batch, batch, dtype).astype(weight.dtype)


project.defvjp(_project_forward, _project_backward)


def _dot(
    a: jax.Array, b: jax.Array, dims_a: range, dims_b: range, dtype: DTypeLike | None
) -> jax.Array:
    contracted = (tuple(dims_a), tuple(dims_b))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)


# ------------------------------------------------------------------------------------------------
# Normalisation
# ------------------------------------------------------------------------------------------------


class RMSNorm(nnx.Module):
    """Root-mean-square norm of the last dimension, in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, *, eps: float, dtype: DTypeLike, axis: str = "norm"):
        self.eps = eps
        self.scale = declare((dim,), (axis,), dtype, fill=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise x [..., dim]; the result has its shape and dtype."""
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32)).astype(x.dtype)


# ------------------------------------------------------------------------------------------------
# Rotary position embedding (Su et al. 2021)
# ------------------------------------------------------------------------------------------------


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Return angular frequencies, float32 [C / 2].

    With `scaling.factor` > 1, wavelengths above original/low_freq_factor are stretched by the
    factor, those below original/high_freq_factor stay, and those between are interpolated
    (Llama 3.1 model card).
    """
    freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.factor > 1:
        turns = scaling.original_max_position * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        freq = freq * (keep + (1 - keep) / scaling.factor)
    return freq.astype(np.float32)


def rotate(x_BTHC: jax.Array, positions_BT: jax.Array, freq: np.ndarray) -> jax.Array:
    """Rotate the pairs (c, c + C/2) of every head by positions * freq.

    Args:
      x_BTHC: [B, T, H, C] of any float dtype, which the result has too.
      positions_BT: int32 [B, T].
      freq: float32 [C / 2].
    """
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * freq  # [B, T, 1, C/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)  # [B, T, H, C/2] each
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


# ------------------------------------------------------------------------------------------------
# Gated MLP (SwiGLU, Shazeer 2020)
# ------------------------------------------------------------------------------------------------


class GatedMLP(nnx.Module):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        std = 1 / math.sqrt(D)
        out_std = 1 / math.sqrt(F * 2 * config.num_layers)  # see `Attention`
        self.gate = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.up = declare((D, F), ("embed", "mlp"), dtype, stddev=std)
        self.down = declare((F, D), ("mlp", "embed"), dtype, stddev=out_std)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the MLP to each token, [B, T, D] -> [B, T, D]."""
        gate = checkpoint_name(project(x_BTD, self.gate[...]), "mlp_gate")  # [B, T, F]
        up = checkpoint_name(project(x_BTD, self.up[...]), "mlp_up")  # [B, T, F]
        hidden = jax.nn.silu(gate) * up
        return checkpoint_name(project(hidden, self.down[...]), "mlp_down")


# ------------------------------------------------------------------------------------------------
# Dropout
# ------------------------------------------------------------------------------------------------


def dropout(x_BTD: jax.Array, rate: float, key: jax.Array, side: SideInputs) -> jax.Array:
    """Zero entries with probability `rate` and scale the others by 1 / (1 - rate).

    The mask depends on (key, sequence, segment, position) only, so that no layout of devices and no
    order of tokens changes it.

    Args:
      x_BTD: [B, T, D].
      rate: in [0, 1).
      key: key of the step, layer and sublayer.
      side: identifies sequences and tokens.
    """

    def keep_token(key: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, segment), position)
        return jax.random.bernoulli(key, 1 - rate, x_BTD.shape[2:])  # [D]

    def keep_sequence(sequence: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        sequence_key = jax.random.fold_in(key, sequence)
        return jax.vmap(keep_token, (None, 0, 0))(sequence_key, segments, positions)  # [T, D]

    mask = jax.vmap(keep_sequence)(side.sequence_index, side.segment_ids, side.positions)
    return jnp.where(mask, x_BTD / (1 - rate), 0).astype(x_BTD.dtype)
