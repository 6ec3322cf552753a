"""Rotary position embedding (Su et al. 2021) and the ways to stretch it to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import RopeScalingConfig


def frequencies(dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Return angular frequencies, scaled as configured, float32 [dim / 2].

    Args:
      dim: rotated channels of a head.
      theta: base of the frequencies.
      scaling: its `length` is not auto with longrope.
    """
    freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling.type == "longrope":
        assert scaling.length in ("short", "long"), "model.rope_scaling.length is not resolved"
        divisors = scaling.long_factor if scaling.length == "long" else scaling.short_factor
        freq = freq / np.asarray(divisors, np.float64)
    elif scaling.factor > 1:
        freq = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[scaling.type](
            freq, dim, theta, scaling
        )
    return freq.astype(np.float32)


def rotary_factor(scaling: RopeScalingConfig) -> float:
    """Return the factor of rotated queries and keys; 1 but for yarn and longrope."""
    if scaling.type not in ("yarn", "longrope") or scaling.factor == 1:
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.type == "yarn":
        return 0.1 * math.log(scaling.factor) + 1
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def rotate(
    x_BTHC: jax.Array,
    positions_BT: jax.Array,
    freq: np.ndarray | jax.Array,
    factor: float | jax.Array = 1.0,
    *,
    interleaved: bool = False,
) -> jax.Array:
    """Rotate pairs of the first R channels of every head by positions * freq.

    Args:
      x_BTHC: [B, T, H, C] of any float dtype, which the result has too.
      positions_BT: int32 [B, T].
      freq: float32 [R / 2], R <= C; the channels from R on stay.
      factor: multiplies the rotated channels.
      interleaved: rotate the pairs (2i, 2i + 1) instead of (i, i + R/2).
    """
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


def _linear(freq: np.ndarray, dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    return freq / scaling.factor


def _llama3(freq: np.ndarray, dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Stretch wavelengths above original/low_freq_factor by the factor (Llama 3.1 model card).

    Those below original/high_freq_factor stay, and those between are interpolated.
    """
    turns = scaling.original_max_position * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return freq * (keep + (1 - keep) / scaling.factor)


def _yarn(freq: np.ndarray, dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Stretch slow frequencies by the factor and keep fast ones (Peng et al. 2023, NTK by parts).

    The bounds are indices of frequencies, between which the share that is stretched grows linearly.
    """

    def index_of(turns: float) -> float:
        """Return the index of the frequency that turns so often in the original context."""
        wavelength = scaling.original_max_position / turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return freq * (1 - stretched + stretched / scaling.factor)
