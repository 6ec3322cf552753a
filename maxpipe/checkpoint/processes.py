"""Agreement between processes; with one process each of these is the identity."""

import jax
import numpy as np


def agree(ok: bool) -> bool:
    """True if `ok` is true in every process."""
    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))


def of_first_process(value: int) -> int:
    """Process 0's `value`, in every process; below 2^31."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def barrier(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
