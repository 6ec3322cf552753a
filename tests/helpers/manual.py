"""Functions of a device's parts, manual over `MANUAL_AXES` as in the engines, and their inputs."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from maxpipe.pipeline.manual import MANUAL_AXES


def mesh_of(**sizes: int) -> Mesh:
    axes = ("stage", "data", "fsdp", "context", "tensor", "expert")
    shape = [sizes.get(axis, 1) for axis in axes]
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)


def manual(
    f: Callable[..., object], in_specs: object, out_specs: object, **sizes: int
) -> jax.stages.Wrapped:
    """Return `f` as a compiled function of global arrays, on a mesh of these sizes."""
    run = jax.shard_map(
        f,
        mesh=mesh_of(**sizes),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
        in_specs=in_specs,
        out_specs=out_specs,
    )
    return jax.jit(run)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
