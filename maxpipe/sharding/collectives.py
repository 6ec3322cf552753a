"""Exchange arrays between the devices along one mesh axis, differentiably.

For use in programs that are manual over the axis. Sums over devices are float32, for accuracy;
bfloat16 ones also abort XLA's CPU backend in partially manual programs. Among few devices each adds
up what the others have sent it.

Letters: n devices along the axis, L entries of a device in the dimension that is split, R rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import float0

# Up to so many devices send each other their parts of a bfloat16 sum, in half the bytes of a sum on
# the way, which is float32. Among more, each link would carry too much.
FEW_DEVICES = 4
CONTEXT_AXIS = "context"
EXPERT_AXIS = "expert"


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    """Return the entries of all devices, [..., L, ...] -> [..., n L, ...]."""
    return lax.all_gather(x, axis_name, axis=dimension, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def summed(x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    """Return the sum of all devices' arrays for this device's entries, n L -> L."""
    devices = lax.axis_size(axis_name)
    if x.dtype.itemsize < 4 and devices <= FEW_DEVICES:
        parts = lax.all_to_all(x, axis_name, dimension, dimension, tiled=True)
        first, *others = jnp.split(parts, devices, dimension)
        # TPUs add arrays five times as fast as they sum over a dimension of one.
        total = sum((other.astype(jnp.float32) for other in others), first.astype(jnp.float32))
        return total.astype(x.dtype)
    total = lax.psum_scatter(
        x.astype(jnp.float32), axis_name, scatter_dimension=dimension, tiled=True
    )
    return total.astype(x.dtype)


def swapped(x: jax.Array, axis_name: str) -> jax.Array:
    """Send entry i of [n, ...] to device i; return what each device has sent here, [n, ...]."""
    return lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)


class Routes(NamedTuple):
    """The rows that a device sends to and receives from each device, itself included; int32 [n].

    Attributes:
      first: index of the first row for each device; rows for one device are contiguous.
      sent: number of rows for each device.
      first_there: index of that row among the rows that the other device receives.
      received: number of rows from each device.
    """

    first: jax.Array
    sent: jax.Array
    first_there: jax.Array
    received: jax.Array


def routes(sent: jax.Array, axis_name: str) -> tuple[Routes, Routes]:
    """Return the routes of rows that are sorted by destination device, and the routes back.

    Received rows are sorted by the device that sent them, without gaps. `sent` is the number
    of rows for each device, int32 [n].
    """
    own = lax.axis_index(axis_name)
    counts = lax.all_gather(sent, axis_name)  # [n, n], from each device to each
    before_sent = jnp.cumsum(counts, axis=1) - counts  # first row in what a device sends
    before_received = jnp.cumsum(counts, axis=0) - counts  # and in what a device receives
    received = counts[:, own]
    there = Routes(before_sent[own], sent, before_received[own], received)
    return there, Routes(before_received[:, own], received, before_sent[:, own], sent)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def delivered(
    x: jax.Array, there: Routes, back: Routes, num_received: int, axis_name: str
) -> jax.Array:
    """Send rows to other devices; return the rows received, [R, ...] -> [num_received, ...].

    Rows of the result that nothing arrives for are zero. Gradients travel along the routes back.
    """
    empty = jnp.zeros((num_received, *x.shape[1:]), x.dtype)
    return lax.ragged_all_to_all(x, empty, *there, axis_name=axis_name)


def _delivered_backward(
    num_received: int, axis_name: str, saved: tuple[Routes, Routes, int], gradient: jax.Array
) -> tuple[jax.Array, Routes, Routes]:
    there, back, num_sent = saved
    x = delivered(gradient, back, there, num_sent, axis_name)
    return x, *jax.tree.map(lambda a: np.zeros(a.shape, float0), (there, back))


delivered.defvjp(
    lambda x, there, back, *static: (delivered(x, there, back, *static), (there, back, x.shape[0])),
    _delivered_backward,
)

# (axis_name, dimension, None from the forward pass, gradient) -> (gradient of x,)
gathered.defvjp(
    lambda x, *where: (gathered(x, *where), None),
    lambda axis_name, dimension, _, gradient: (summed(gradient, axis_name, dimension),),
)
summed.defvjp(
    lambda x, *where: (summed(x, *where), None),
    lambda axis_name, dimension, _, gradient: (gathered(gradient, axis_name, dimension),),
)
