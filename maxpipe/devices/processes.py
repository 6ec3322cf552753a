"""Let processes agree on values; with one process every function returns its argument at once."""

import itertools
import secrets
from pathlib import Path
from typing import Any

import jax
import numpy as np

_POSTS_KEPT = 1000  # far more posts than processes may be apart
# Without a limit: heartbeats and the watchdog end a run whose process 0 is lost or hangs.
_ENDLESS_MS = 2**31 - 1
_posts = itertools.count()
_reports = itertools.count()


def count() -> int:
    """Return the number of processes of the run, without starting the devices."""
    return _state().num_processes or 1 if coordinator() else 1


def index() -> int:
    """Return this process's index, without starting the devices."""
    return _state().process_id or 0 if coordinator() else 0


def post(key: str, value: str) -> None:
    coordinator().key_value_set(key, value)


def read(key: str) -> str:
    value: str = coordinator().blocking_key_value_get(key, _ENDLESS_MS)
    return value


def agree(ok: bool) -> bool:
    """Return whether `ok` is true in every process."""
    if jax.process_count() == 1:
        return ok
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))


def of_first_process(value: int) -> int:
    """Return process 0's `value` in every process, without using the devices."""
    if jax.process_count() == 1:
        return value
    number = next(_posts)
    if jax.process_index() != 0:
        return int(read(f"maxpipe/post/{number}"))
    post(f"maxpipe/post/{number}", str(value))
    if number >= _POSTS_KEPT:
        coordinator().key_value_delete(f"maxpipe/post/{number - _POSTS_KEPT}")
    return value


def of_all_on_first(value: str) -> list[str]:
    """Return every process's `value` on process 0, and nothing on others; only process 0 waits."""
    if jax.process_count() == 1:
        return [value]
    store, directory = coordinator(), f"maxpipe/report/{next(_reports)}"
    if jax.process_index() != 0:
        post(f"{directory}/{jax.process_index()}", value)
        return []
    keys = [f"{directory}/{index}" for index in range(1, jax.process_count())]
    # Each call takes a round trip: while one process is waited for, the others report as well.
    while missing := set(keys) - (posted := dict(store.key_value_dir_get(directory))).keys():
        read(min(missing))
    store.key_value_delete(directory)
    return [value, *(posted[key] for key in keys)]


def share(directory: Path) -> bool:
    """Return whether all processes see the same directory, which exists and is writable."""
    if jax.process_count() == 1:
        return True
    number, is_first = secrets.randbits(31), jax.process_index() == 0
    if is_first:
        (directory / f".shared-{number}").touch()
    trace = directory / f".shared-{of_first_process(number)}"
    is_seen_by_all = agree(trace.exists())
    if is_first:
        trace.unlink()
    return is_seen_by_all


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def coordinator() -> Any:
    """Return JAX's client of the coordination service; None if there is only one process."""
    return _state().client


def coordinator_address() -> str:
    return str(_state().coordinator_address)


def _state() -> Any:
    from jax._src import distributed  # there is no public name for it

    return distributed.global_state
