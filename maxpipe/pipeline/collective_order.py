"""Put collectives of a manual program in one order on CPU devices.

XLA's CPU runtime starts a collective as soon as its operands are there, even while a loop or a
conditional that comes before it still runs. A manual program's collectives all have the same
channel, by which the devices of a process find each other: two that run at once on the same devices
exchange each other's values, or wait for ever. TPUs and GPUs keep the order of the program.

A barrier is no remedy, since XLA removes it before it schedules. What remains is a dependency on
values, through a condition that is never true but that XLA does not see through.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Tree = TypeVar("Tree")  # an array or a pytree of arrays


def needs_order(mesh: Mesh) -> bool:
    """Return whether the devices are several CPU devices."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def after(values: Tree, *earlier: object) -> Tree:
    """Return `values` unchanged, to be computed once `earlier` has been.

    Args:
      values: pytree of arrays that a collective, or a loop with some, takes.
      earlier: pytrees of arrays, the results of what has to come first; None is no array.
    """
    leaves = [leaf for leaf in jax.tree.leaves(earlier) if leaf.size]
    if not leaves:
        return values
    sample = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in leaves)
    never = (sample < 0) & (sample > 0)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), values)
