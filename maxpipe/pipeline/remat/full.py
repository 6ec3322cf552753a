"""Save a layer's input only; recompute everything else."""

from collections.abc import Callable
from typing import Any

import jax

from maxpipe.pipeline.remat import REMAT


@REMAT.register()
def full(layer: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
