"""Compute the frequencies of rotary embeddings, and stretch them to longer contexts."""

import math

import numpy as np

from maxpipe.config.sections import RopeScalingConfig


def frequencies(dim: int, theta: float, scaling: RopeScalingConfig) -> np.ndarray:
    """Return angular frequencies, scaled as configured, float32 [dim / 2].

    Args:
      dim: rotated channels of a head.
      theta: base of the frequencies.
      scaling: scaling of the frequencies; with longrope its `length` is not auto.
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
    """Return the factor of rotated queries and keys; 1 except for yarn and longrope."""
    if scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor or scaling.factor == 1:
        return scaling.attention_factor or 1.0
    if scaling.type == "yarn":
        return 0.1 * math.log(scaling.factor) + 1
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))


def score_factor(scaling: RopeScalingConfig) -> float:
    """Return the factor of attention scores, which DeepSeek's yarn has besides the rotary factor.

    It stands in for a factor of all channels, including those that are not rotated.
    """
    if scaling.type != "yarn" or scaling.factor == 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


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
        """Return the index of the frequency that makes `turns` turns in the original context."""
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
