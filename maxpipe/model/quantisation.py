"""Multiply activations with weights in 8 bits, `model.quantisation`.

Both operands of a product are divided by scales and rounded to an 8-bit format; the scales multiply
the result. An activation has a scale for each token, a weight one for each channel of the result:
the largest absolute value along the dimensions that are summed over becomes the largest value of
the format. Scales are computed anew for each product. They depend on one token, or on the weight,
so they do not depend on microbatches, mesh or engine.

The gradient of a weight is a sum over tokens. Its scales would span the tokens of a microbatch on
one device, and change with the layout, so this product stays in the compute dtype.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxpipe.model.layers import dot, input_gradient, weight_gradient

# Lower bound of the largest value of a row or channel, so that no scale is subnormal. If all are
# smaller, values of at least half a step of the format are kept, and the others become 0.
_LEAST = 1e-30


class Format(NamedTuple):
    """An 8-bit format.

    Attributes:
      dtype: dtype of operands.
      largest: value to which the largest operand of a row or channel is scaled.
      sum_dtype: dtype in which products are summed.
    """

    dtype: DTypeLike
    largest: float
    sum_dtype: DTypeLike


# Sums of int8 are exact up to 2^31 / 127^2 = 133,000 terms. With a scale for each row e4m3 has
# enough range for gradients, and half the rounding error of e5m2.
FORMATS = {
    "int8": Format(jnp.int8, 127, jnp.int32),
    "fp8": Format(jnp.float8_e4m3fn, 448, jnp.float32),
}


def quantise(x: jax.Array, dims: range, form: Format) -> tuple[jax.Array, jax.Array]:
    """Return (x / scale in 8 bits, scale).

    Args:
      x: array of any float dtype.
      dims: dimensions that share a scale.
      form: the format.

    Returns:
      The scale is float32, with size 1 in `dims`; not finite where x is not.
    """
    # The maximum is exact in any dtype; a product per value is cheaper than a quotient.
    largest = jnp.max(jnp.abs(x), axis=tuple(dims), keepdims=True).astype(jnp.float32)
    largest = jnp.maximum(largest, _LEAST)
    scaled = x.astype(jnp.float32) * (form.largest / largest)
    if jnp.issubdtype(form.dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return scaled.astype(form.dtype), largest / form.largest


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def project_quantised(
    form: Format, is_full: bool, x: jax.Array, weight: jax.Array, contracted: int
) -> jax.Array:
    """Multiply as `project` does, with both operands in 8 bits.

    Args:
      form: the format.
      is_full: whether the gradient of `x` is such a product, too; otherwise both gradients are the
        same as with `project`, as if nothing had been rounded.
      x, weight, contracted: as for `project`.

    Returns:
      [..., *K] in the dtype of `x`.
    """
    summed = range(x.ndim - contracted, x.ndim)
    return _quantised_dot(x, weight, summed, range(contracted), form)


def _forward(
    form: Format, is_full: bool, x: jax.Array, weight: jax.Array, contracted: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project_quantised(form, is_full, x, weight, contracted), (x, weight)


def _backward(
    form: Format,
    is_full: bool,
    contracted: int,
    operands: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    of_weight = weight_gradient(x, cotangent, contracted)
    if not is_full:
        return input_gradient(cotangent, weight, contracted), of_weight
    outputs = range(x.ndim - contracted, cotangent.ndim)
    of_x = _quantised_dot(cotangent, weight, outputs, range(contracted, weight.ndim), form)
    return of_x, of_weight


project_quantised.defvjp(_forward, _backward)


def _quantised_dot(
    a: jax.Array, b: jax.Array, dims_a: range, dims_b: range, form: Format
) -> jax.Array:
    """Return the product, summed over `dims_a`, the last dimensions of `a`, in the dtype of `a`."""
    rows, scale_a = quantise(a, dims_a, form)
    columns, scale_b = quantise(b, dims_b, form)
    sums = dot(rows, columns, dims_a, dims_b, form.sum_dtype).astype(jnp.float32)
    # [..., 1] -> [..., 1 for each dimension of the channels]
    scale_b = scale_b.squeeze(tuple(dims_b))
    scale_a = scale_a.squeeze(tuple(dims_a))
    scale_a = jnp.expand_dims(scale_a, tuple(range(scale_a.ndim, sums.ndim)))
    return (sums * scale_a * scale_b).astype(a.dtype)
