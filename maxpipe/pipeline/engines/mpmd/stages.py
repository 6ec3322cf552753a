"""Sub-meshes of stages, and what of a global array lies on one of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The mesh of each stage: all axes, `stage` with size 1."""
    axis = mesh.axis_names.index("stage")
    return [
        Mesh(np.take(mesh.devices, [s], axis), mesh.axis_names) for s in range(mesh.shape["stage"])
    ]


def local_view(x: jax.Array, mesh: Mesh) -> jax.Array:
    """A global array that every stage holds, as an array of one stage; nothing is copied.

    Args:
      x: laid out over the mesh of all stages, replicated over `stage`.
      mesh: of the stage.
    """
    assert isinstance(x.sharding, NamedSharding)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    sharding = NamedSharding(mesh, x.sharding.spec)
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [shards[d] for d in mesh.devices.flat]
    )


def named(tree: Any) -> dict[str, Any]:
    """Leaves by path."""
    return dict(zip(paths(tree), jax.tree.leaves(tree), strict=True))


def paths(tree: Any) -> list[str]:
    """Path of every leaf, such as "['params']['head']['kernel']"."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
