"""Put collectives of a manual program in one order on CPU devices.

XLA's CPU runtime starts a collective as soon as its operands are ready, even while a loop or a
conditional that comes before it still runs. A manual program's collectives all have the same
channel, by which the devices of a process find each other: two that run at once on the same devices
exchange each other's values, or wait forever. TPUs and GPUs keep the order of the program.

An optimization barrier does not help, since XLA removes it before it schedules. What works is a
data dependency, through a condition that is never true, which XLA does not notice.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Tree = TypeVar("Tree")  # an array or a pytree of arrays


def needs_order(mesh: Mesh) -> bool:
    """Return whether the mesh has several devices and they are CPUs."""
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def after(values: Tree, *earlier: object) -> Tree:
    """Return `values` unchanged, to be computed once `earlier` has been.

    Args:
      values: operands of a collective, or of a loop with collectives; a pytree of arrays.
      earlier: results of what must run first, pytrees of arrays; None is ignored.
    """
    leaves = [leaf for leaf in jax.tree.leaves(earlier) if leaf.size]
    if not leaves:
        return values
    sample = sum(leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in leaves)
    never = (sample < 0) & (sample > 0)
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), values)
