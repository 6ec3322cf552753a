"""A state as a flat table of named arrays, which is what lies on disk, and how two such tables differ."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from maxpipe.checkpoint.record import Leaf

ITERATOR = "iterator"  # name of the data position in the table, beside the state's own leaves


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by dotted path (`params.layers.attention.query`), in the tree's order.

    Paths, not containers, are what a checkpoint knows, so that a NamedTuple may become a dataclass between
    versions.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(named) == len(paths), "two leaves share a dotted path"
    assert not named.keys() & {ITERATOR, ""}, "a state is a tree of named leaves, none of them `iterator`"
    return named


def saveable(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """The leaf as an array.

    Raises:
      TypeError: it is not an array of plain numbers.
    """
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} is a typed PRNG key; save jax.random.key_data of it")
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds JAX and NumPy arrays")


def nbytes(leaf: Leaf) -> int:
    """Bytes of the whole array in memory."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def differences(saved: Mapping[str, Leaf], wanted: Mapping[str, Any], any_float: bool = False) -> list[str]:
    """One line for each array that is missing, unexpected, or of another shape or dtype.

    Args:
      saved: leaves of a checkpoint without the iterator state.
      wanted: name -> anything with a shape and a dtype.
      any_float: whether two floating dtypes are as good as equal.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        here = (
            Leaf(tuple(wanted[name].shape), np.dtype(wanted[name].dtype).name, 0) if name in wanted else None
        )
        there = saved.get(name)
        if here is None:
            lines.append(f"{name}: {there} in the checkpoint, unknown to this run")
        elif there is None:
            lines.append(f"{name}: {here} in this run, not in the checkpoint")
        elif here.shape != there.shape or (here.dtype != there.dtype and not (any_float and _are_floats(here, there))):
            lines.append(f"{name}: {there} in the checkpoint, {here} in this run")
    return lines


def _are_floats(*leaves: Leaf) -> bool:
    return all(jax.dtypes.issubdtype(np.dtype(leaf.dtype), np.floating) for leaf in leaves)
