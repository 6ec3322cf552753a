"""Host batches -> global device arrays, and data positions -> one array of all rows.

A fingerprint of every batch in its row of metrics: proof that none is repeated or left out over
restarts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.digest import device_digest
from maxpipe.devices.mesh import rows_of_this_process
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.training.trainer import Trainer

HostBatch = dict[str, np.ndarray]


class BatchPlacer:
    """Places this process's rows of a batch on its devices.

    Args:
      mesh: the device mesh.
      spec: PartitionSpec of a [rows, tokens] array.
      num_rows: B, rows of the global batch.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec, num_rows: int):
        self.rows = rows_of_this_process(mesh, spec, num_rows)
        self._position = {row: i for i, row in enumerate(self.rows)}
        self._sharding = NamedSharding(mesh, spec)
        self._num_rows = num_rows

    def __call__(self, batch: HostBatch) -> dict[str, jax.Array]:
        """[rows of this process, T] -> global arrays [B, T]."""
        with jax.transfer_guard("allow"):
            return {name: self._place(x) for name, x in batch.items()}

    def _place(self, local: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            rows = range(*index[0].indices(self._num_rows))
            return local[[self._position[row] for row in rows]][:, index[1]]

        return jax.make_array_from_callback((self._num_rows, local.shape[1]), self._sharding, shard)


def all_rows(state: np.ndarray, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """The data position of every row of the global batch, in every process.

    Args:
      state: int64 [R, 3], `Loader.state` of this process.
      rows: the rows that they belong to.
      num_rows: B.
    """
    if jax.process_count() == 1:
        return state
    from jax.experimental import multihost_utils

    # Without x64 mode JAX has no int64, so the bits travel as pairs of 32.
    bits = np.full((num_rows, 6), 0, np.uint32)
    mine = np.zeros(num_rows, np.uint32)
    bits[list(rows)], mine[list(rows)] = np.ascontiguousarray(state).view(np.uint32), 1
    gathered, owned = multihost_utils.process_allgather((bits, mine))
    owner = np.argmax(owned, axis=0)
    return np.ascontiguousarray(gathered[owner, np.arange(num_rows)]).view(np.int64)


class WithBatchDigest:
    """An engine whose steps have the further metric `batch_digest`, uint32.

    It depends on the global batch only, neither on mesh nor on processes.

    Args:
      engine: does everything else.
    """

    def __init__(self, engine: Trainer):
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
    digests = [
        device_digest(batch[name]) * np.uint32(2 * i + 1) for i, name in enumerate(sorted(batch))
    ]
    return jnp.stack(digests).sum(dtype=jnp.uint32)
