"""Rotations; frequencies of each scaling are compared with those of transformers in `tests/hf`."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config import RopeScalingConfig
from maxpipe.model.attention import rotate
from maxpipe.model.rope import frequencies, rotary_factor


def test_frequencies_are_powers_of_theta_and_linear_scaling_divides_them():
    plain = frequencies(8, 10_000.0, RopeScalingConfig())
    assert plain == pytest.approx([1, 0.1, 0.01, 0.001])
    assert plain.dtype == np.float32
    linear = RopeScalingConfig(type="linear", factor=4)
    assert frequencies(8, 10_000.0, linear) == pytest.approx(plain / 4)
    assert rotary_factor(linear) == 1


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate_is_a_complex_product_of_the_first_channels(rotated, interleaved):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 100, (2, 5)).astype(np.int32)
    freq = frequencies(rotated, 10_000.0, RopeScalingConfig())
    half = rotated // 2
    real, imaginary = slice(0, half), slice(half, rotated)
    if interleaved:
        real, imaginary = slice(0, rotated, 2), slice(1, rotated, 2)
    turned = 1.5 * (x[..., real] + 1j * x[..., imaginary])
    turned = turned * np.exp(1j * positions[:, :, None, None] * freq)
    expected = x.copy()
    expected[..., real], expected[..., imaginary] = turned.real, turned.imag
    actual = rotate(jnp.asarray(x), jnp.asarray(positions), freq, 1.5, interleaved=interleaved)
    np.testing.assert_allclose(actual, expected, atol=3e-5)


def test_rotate_of_bfloat16_returns_bfloat16_with_float32_angles():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    turned = rotate(x, jnp.array([[4097]]), frequencies(4, 10_000.0, RopeScalingConfig()))
    assert turned.dtype == jnp.bfloat16
    # In bfloat16 position 4097 would be 4096.
    assert float(turned[0, 0, 0, 0]) == pytest.approx(math.cos(4097) - math.sin(4097), abs=1e-2)


@pytest.mark.parametrize(
    ("dtype", "interleaved", "rotated_dim"),
    [("float32", False, 8), ("float32", True, 4), ("bfloat16", True, 8), ("bfloat16", False, 4)],
)
def test_rotate_by_product_has_the_bits_of_slices_and_of_their_gradient(
    dtype, interleaved, rotated_dim
):
    x, weight = (jax.random.normal(jax.random.key(i), (2, 5, 3, 8)).astype(dtype) for i in range(2))
    positions = jnp.arange(10).reshape(2, 5)
    # Frequencies of a layer that was looked up are an array of the program.
    freq = jnp.asarray(frequencies(rotated_dim, 100.0, RopeScalingConfig()))

    def rotated(x, freq, by_product):
        return rotate(x, positions, freq, 1.25, interleaved=interleaved, by_product=by_product)

    results = [jax.vjp(lambda x, way=way: rotated(x, freq, way), x) for way in (False, True)]
    (expected, of_slices), (actual, of_product) = results
    assert actual.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(of_product(weight)[0], of_slices(weight)[0])


def test_factor_of_queries_counts_without_a_longer_context():
    """As in transformers, whose classes look at attention_factor first."""
    longer = RopeScalingConfig(type="longrope", factor=4, original_max_position=16)
    assert rotary_factor(longer) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    for kind in ("yarn", "longrope"):
        scaling = RopeScalingConfig(type=kind, factor=1.0, attention_factor=1.2)
        assert rotary_factor(scaling) == 1.2
        assert rotary_factor(replace(scaling, attention_factor=0.0)) == 1
