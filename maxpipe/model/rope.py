"""Rotary position embedding (Su et al. 2021), with the Llama-3 scaling of frequencies."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.sections import RopeScalingConfig


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Angular frequencies, float32 [head_dim / 2].

    With `scaling.factor` > 1, wavelengths above original/low_freq_factor are stretched by the factor, those below
    original/high_freq_factor are kept, and those between are interpolated (Llama 3.1 model card).
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
