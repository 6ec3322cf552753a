"""A fingerprint of every batch in its row of metrics: proof that none is repeated or left out over restarts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.digest import device_digest
from maxpipe.pipeline.contract import Batch, Metrics
from maxpipe.training.engine import Engine


class WithBatchDigest:
    """An engine whose steps have the further metric `batch_digest`, uint32.

    It depends on the global batch only, neither on mesh nor on processes.

    Args:
      engine: does everything else.
    """

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        digest = batch_digest(batch)
        state, metrics = self._engine.step(state, batch)
        return state, metrics | {"batch_digest": digest}


@jax.jit
def batch_digest(batch: Batch) -> jax.Array:
    """uint32 scalar; the arrays are told apart by odd factors, in the order of their names."""
    digests = [device_digest(batch[name]) * np.uint32(2 * i + 1) for i, name in enumerate(sorted(batch))]
    return jnp.stack(digests).sum(dtype=jnp.uint32)
