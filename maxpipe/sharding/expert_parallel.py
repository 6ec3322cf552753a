"""Exchange tokens and results between the devices along mesh axis `expert`, differentiably.

For use in a program that is manual over the axis. Each device has rows of its own, and some of the
experts. Sums over devices are float32, for accuracy; bfloat16 ones also abort XLA's CPU backend in
partially manual programs.

Letters: B rows of a device, n devices along the axis.
"""

import jax
import jax.numpy as jnp
from jax import lax

EXPERT_AXIS = "expert"


@jax.custom_vjp
def gathered(x: jax.Array) -> jax.Array:
    """Return the rows of all devices, [B, ...] -> [n B, ...]."""
    return lax.all_gather(x, EXPERT_AXIS, axis=0, tiled=True)


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """Return the sum of all devices' [n B, ...] for this device's rows, [B, ...]."""
    total = lax.psum_scatter(x.astype(jnp.float32), EXPERT_AXIS, scatter_dimension=0, tiled=True)
    return total.astype(x.dtype)


def swapped(x: jax.Array) -> jax.Array:
    """Send entry i of [n, ...] to device i; return what each device has sent here, [n, ...]."""
    return lax.all_to_all(x, EXPERT_AXIS, split_axis=0, concat_axis=0)


gathered.defvjp(lambda x: (gathered(x), None), lambda _, gradient: (summed(gradient),))
summed.defvjp(lambda x: (summed(x), None), lambda _, gradient: (gathered(gradient),))
