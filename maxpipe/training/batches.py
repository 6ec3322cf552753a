"""Bring batches from the hosts to the devices: placement, positions, fingerprints.

Letters: B rows of the global batch, R rows of this process, T tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.digest import device_digest
from maxpipe.devices.mesh import rows_of_this_process
from maxpipe.pipeline.engines.base import Batch

HostBatch = dict[str, np.ndarray]


class BatchPlacer:
    """Place this process's rows of a batch on its devices.

    Args:
      spec: layout of a [B, T] array.
      num_rows: B.

    Attributes:
      num_rows: B.
      rows: indices in the global batch of the R rows that this process places.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec, num_rows: int):
        self.rows = rows_of_this_process(mesh, spec, num_rows)
        self._position = {row: i for i, row in enumerate(self.rows)}
        self._sharding = NamedSharding(mesh, spec)
        self.num_rows = num_rows

    def __call__(self, batch: HostBatch) -> Batch:
        with jax.transfer_guard("allow"):
            return {name: self._place(x) for name, x in batch.items()}

    def _place(self, local: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            rows = range(*index[0].indices(self.num_rows))
            return local[[self._position[row] for row in rows]][:, index[1]]

        return jax.make_array_from_callback((self.num_rows, local.shape[1]), self._sharding, shard)


def all_rows(state: np.ndarray, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """Return the data position of every row of the global batch, int64 [B, 3], in every process.

    Args:
      state: int64 [R, 3], `Loader.state` of this process.
      rows: indices of these rows in the global batch.
    """
    if jax.process_count() == 1:
        return state
    from jax.experimental import multihost_utils

    # Without x64 mode JAX has no int64, so the bits travel as pairs of uint32.
    bits = np.zeros((num_rows, 6), np.uint32)
    has_row = np.zeros(num_rows, np.uint32)
    bits[list(rows)] = np.ascontiguousarray(state).view(np.uint32)
    has_row[list(rows)] = 1
    bits, has_row = multihost_utils.process_allgather((bits, has_row))  # [processes, B, ...]
    owner = np.argmax(has_row, axis=0)
    return np.ascontiguousarray(bits[owner, np.arange(num_rows)]).view(np.int64)


@jax.jit
def batch_digest(batch: Batch) -> jax.Array:
    """Return a fingerprint of a global batch, uint32 scalar."""
    # Weighted by odd factors, so that it changes if two arrays trade places.
    digests = [
        device_digest(batch[name]) * np.uint32(2 * i + 1) for i, name in enumerate(sorted(batch))
    ]
    return jnp.stack(digests).sum(dtype=jnp.uint32)
