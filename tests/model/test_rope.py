import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config import RopeScalingConfig
from maxpipe.model.layers import frequencies, rotate

LLAMA_31 = RopeScalingConfig(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


def llama_31_by_wavelength(freq):
    """The published rule, one frequency at a time."""
    wavelength = 2 * math.pi / freq
    if wavelength < 8192 / 4:
        return freq
    if wavelength > 8192:
        return freq / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * freq / 8 + smooth * freq


def test_frequencies_are_powers_of_theta():
    assert frequencies(8, 10_000.0, RopeScalingConfig()) == pytest.approx([1, 0.1, 0.01, 0.001])
    assert frequencies(8, 10_000.0, RopeScalingConfig()).dtype == np.float32


def test_frequencies_of_llama_31_equal_the_published_scaling():
    plain = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    scaled = frequencies(128, 500_000.0, LLAMA_31)
    assert scaled == pytest.approx([llama_31_by_wavelength(f) for f in plain], rel=1e-6)
    # Fast turns stay, the slowest become eight times slower, and some are in between.
    assert scaled[0] == 1
    assert scaled[-1] == pytest.approx(3.0689e-07, rel=1e-4)
    ratio = np.array(plain) / scaled
    assert {1.0, 8.0} <= {round(float(r), 4) for r in ratio}
    assert np.any((ratio > 1.01) & (ratio < 7.99))


def test_rotate_is_a_complex_product():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 100, (2, 5)).astype(np.int32)
    freq = frequencies(8, 10_000.0, RopeScalingConfig())
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, :, None, None] * freq)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(
        rotate(jnp.asarray(x), jnp.asarray(positions), freq), expected, atol=2e-5
    )


def test_rotate_makes_scores_depend_on_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    freq = frequencies(16, 10_000.0, RopeScalingConfig())

    def score(i, j):
        at = [rotate(jnp.asarray(x), jnp.array([[p]]), freq) for x, p in ((q, i), (k, j))]
        return float(jnp.sum(at[0] * at[1]))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_rotate_of_bfloat16_returns_bfloat16_with_float32_angles():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    turned = rotate(x, jnp.array([[4097]]), frequencies(4, 10_000.0, RopeScalingConfig()))
    assert turned.dtype == jnp.bfloat16
    # In bfloat16 position 4097 would be 4096.
    assert float(turned[0, 0, 0, 0]) == pytest.approx(math.cos(4097) - math.sin(4097), abs=1e-2)
