"""Sizes of sharded arrays."""

import math
from typing import Any

import jax


def shard_bytes(tree: Any) -> int:
    """Return the bytes of one device's part of an abstract tree with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
