"""Exchange arrays between the devices along one mesh axis, differentiably.

For use in programs that are manual over the axis. Sums over devices are float32, for accuracy;
bfloat16 ones also abort XLA's CPU backend in partially manual programs.

Letters: n devices along the axis, L entries of a device in the dimension that is split.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

CONTEXT_AXIS = "context"
EXPERT_AXIS = "expert"


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    """Return the entries of all devices, [..., L, ...] -> [..., n L, ...]."""
    return lax.all_gather(x, axis_name, axis=dimension, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def summed(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    """Return the sum of all devices' arrays for this device's entries, n L -> L."""
    total = lax.psum_scatter(
        x.astype(jnp.float32), axis_name, scatter_dimension=dimension, tiled=True
    )
    return total.astype(x.dtype)


def swapped(x: jax.Array, axis_name: str) -> jax.Array:
    """Send entry i of [n, ...] to device i; return what each device has sent here, [n, ...]."""
    return lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)


def _gathered_forward(x: jax.Array, axis_name: str, dimension: int) -> tuple[jax.Array, None]:
    return gathered(x, axis_name, dimension), None


def _gathered_backward(
    axis_name: str, dimension: int, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (summed(gradient, axis_name, dimension),)


def _summed_forward(x: jax.Array, axis_name: str, dimension: int) -> tuple[jax.Array, None]:
    return summed(x, axis_name, dimension), None


def _summed_backward(
    axis_name: str, dimension: int, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (gathered(gradient, axis_name, dimension),)


gathered.defvjp(_gathered_forward, _gathered_backward)
summed.defvjp(_summed_forward, _summed_backward)
