"""Multiply activations with weights, and write out the two products of the gradient."""

from functools import partial

import jax
from jax import lax
from jax.typing import DTypeLike


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
    return dot(x, weight, range(num_batch, x.ndim), range(contracted), dtype)


def _forward(
    x: jax.Array, weight: jax.Array, contracted: int, dtype: DTypeLike | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return project(x, weight, contracted, dtype), (x, weight)


def _backward(
    contracted: int,
    dtype: DTypeLike | None,
    operands: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent = cotangent.astype(x.dtype)
    dx = input_gradient(cotangent, weight, contracted, dtype)
    return dx, weight_gradient(x, cotangent, contracted, dtype)


project.defvjp(_forward, _backward)


def input_gradient(
    cotangent: jax.Array, weight: jax.Array, contracted: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the gradient [..., *C] of the activations, in the dtype of the cotangent [..., *K].

    `weight`, `contracted` and `dtype` are those of `project`.
    """
    outputs = range(cotangent.ndim - (weight.ndim - contracted), cotangent.ndim)
    dx = dot(cotangent, weight, outputs, range(contracted, weight.ndim), dtype)
    return dx.astype(cotangent.dtype)


def weight_gradient(
    x: jax.Array, cotangent: jax.Array, contracted: int, dtype: DTypeLike | None = None
) -> jax.Array:
    """Return the gradient [*C, *K] of the weight, in the dtype of `x`; the rest as of `project`."""
    batch = range(x.ndim - contracted)
    return dot(x, cotangent, batch, batch, dtype).astype(x.dtype)


def dot(
    a: jax.Array, b: jax.Array, dims_a: range, dims_b: range, dtype: DTypeLike | None
) -> jax.Array:
    """Return the product of `a` and `b`, summed over these dimensions of each, in `dtype`."""
    contracted = (tuple(dims_a), tuple(dims_b))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)
