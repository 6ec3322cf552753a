"""Products of activations with weights."""

from functools import partial
from typing import Any

import jax
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(x: jax.Array, weight: jax.Array, contracted: int = 1, dtype: Any = None) -> jax.Array:
    """Sums over the last dimensions of `x` and the first of `weight`. Without forward-mode derivatives.

    The gradient for the weight is the product of `x` with the cotangent, in that order. JAX's own rule takes the
    cotangent first and transposes the product: XLA's CPU backend then makes a transposed copy of the cotangent, and
    behind an activation function computes its derivative anew for that, against the grain of the memory.

    Args:
      x: [..., *C], where C are the `contracted` dimensions.
      weight: [*C, *K], in the dtype of `x`.
      contracted: how many dimensions are summed over.
      dtype: of the result, and of gradients until all their sums are made; that of `x` if None. Cotangents are first
        rounded to the dtype of `x`.

    Returns:
      [..., *K].
    """
    kept = x.ndim - contracted
    return _dot(x, weight, range(kept, x.ndim), range(contracted), dtype)


def _forward(x: jax.Array, weight: jax.Array, contracted: int, dtype: Any) -> Any:
    return project(x, weight, contracted, dtype), (x, weight)


def _backward(contracted: int, dtype: Any, operands: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent = cotangent.astype(x.dtype)
    kept = range(x.ndim - contracted)
    dx = _dot(cotangent, weight, range(len(kept), cotangent.ndim), range(contracted, weight.ndim), dtype)
    return dx.astype(x.dtype), _dot(x, cotangent, kept, kept, dtype).astype(weight.dtype)


project.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, of_a: range, of_b: range, dtype: Any = None) -> jax.Array:
    return lax.dot_general(a, b, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=dtype)
