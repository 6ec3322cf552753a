"""RMS normalisation."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxpipe.model.parameters import declare


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
