"""Let processes agree on values; with one process every function returns its argument at once."""

import itertools
import secrets
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

_POSTS_KEPT = 1000  # far more posts than processes may be apart
# Without a limit: heartbeats and the watchdog end a run whose process 0 is lost or hangs.
_ENDLESS_MS = 2**31 - 1
_posts = itertools.count()
_reports = itertools.count()


class KeyValueStore(Protocol):
    """The part of JAX's client of the coordination service that is used here."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def key_value_delete(self, key: str) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


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
    store: KeyValueStore = coordinator()
    if jax.process_index() != 0:
        return int(store.blocking_key_value_get(_post_key(number), _ENDLESS_MS))
    store.key_value_set(_post_key(number), str(value))
    if number >= _POSTS_KEPT:
        store.key_value_delete(_post_key(number - _POSTS_KEPT))
    return value


def of_all_on_first(value: str) -> list[str]:
    """Return every process's `value` on process 0, and nothing on others; only process 0 waits."""
    if jax.process_count() == 1:
        return [value]
    number = next(_reports)
    store: KeyValueStore = coordinator()
    directory = f"maxpipe/report/{number}"
    if jax.process_index() != 0:
        store.key_value_set(f"{directory}/{jax.process_index()}", value)
        return []
    keys = [f"{directory}/{index}" for index in range(1, jax.process_count())]
    # Each call takes a round trip: while one process is waited for, the others report as well.
    while missing := set(keys) - (posted := dict(store.key_value_dir_get(directory))).keys():
        store.blocking_key_value_get(min(missing), _ENDLESS_MS)
    store.key_value_delete(directory)
    return [value, *(posted[key] for key in keys)]


def share(directory: Path) -> bool:
    """Return whether all processes see the same directory, which exists and is writable."""
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


def _trace(directory: Path, number: int) -> Path:
    return directory / f".shared-{number}"


def _post_key(number: int) -> str:
    return f"maxpipe/post/{number}"
