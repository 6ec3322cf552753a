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


# (axis_name, dimension, nothing that the forward pass saves, gradient) -> (gradient of x,)
gathered.defvjp(
    lambda x, *where: (gathered(x, *where), None),
    lambda axis_name, dimension, _, gradient: (summed(gradient, axis_name, dimension),),
)
summed.defvjp(
    lambda x, *where: (summed(x, *where), None),
    lambda axis_name, dimension, _, gradient: (gathered(gradient, axis_name, dimension),),
)
