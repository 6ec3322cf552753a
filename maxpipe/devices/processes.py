"""Agreement between processes; with one process each of these is the identity."""

import itertools
import secrets
from pathlib import Path
from typing import Any

import jax
import numpy as np

_POSTS_KEPT = 1000  # far more than processes may be apart
_ENDLESS_MS = (
    2**31 - 1
)  # ending a run whose process 0 is lost or hangs is for heartbeats and the watchdog
_posts = itertools.count()


def agree(ok: bool) -> bool:
    """True if `ok` is true in every process."""
    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))


def of_first_process(value: int) -> int:
    """Process 0's `value`, in every process; neither uses the devices nor waits for them."""
    if jax.process_count() == 1:
        return value
    number, store = next(_posts), coordinator()
    if jax.process_index() != 0:
        return int(store.blocking_key_value_get(_post_key(number), _ENDLESS_MS))
    store.key_value_set(_post_key(number), str(value))
    if number >= _POSTS_KEPT:
        store.key_value_delete(_post_key(number - _POSTS_KEPT))
    return value


def share(directory: Path) -> bool:
    """Whether all processes see the same directory, which exists and may be written to."""
    if jax.process_count() == 1:
        return True
    number = secrets.randbits(31)
    if jax.process_index() == 0:
        _trace(directory, number).touch()
    trace = _trace(directory, of_first_process(number))
    is_seen_by_all = agree(trace.exists())
    if jax.process_index() == 0:
        trace.unlink()
    return is_seen_by_all


def barrier(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def coordinator() -> Any:
    """JAX's client of the coordination service, a store of keys that all processes share; None with one process."""
    from jax._src import distributed  # there is no public name for it

    return distributed.global_state.client


def _trace(directory: Path, number: int) -> Path:
    return directory / f".shared-{number}"


def _post_key(number: int) -> str:
    return f"maxpipe/post/{number}"
