"""Ending a process that cannot continue, and with it the other processes of the run."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax

from maxpipe.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointSaveError,
    CheckpointUnreadable,
)
from maxpipe.config.cli import CONFIG_ERROR, print_problems
from maxpipe.config.errors import ConfigError, redacted
from maxpipe.devices.processes import coordinator
from maxpipe.telemetry.sink import TelemetryError

FAILED = 1
# Errors whose messages say all that a user can act on.
EXPLAINED = (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointSaveError,
    CheckpointUnreadable,
    TelemetryError,
)

_REASON = "maxpipe/config_error"  # in the store of the coordination service: why the run ends
_POLL_SECONDS = 1.0
_BARRIER_TIMEOUT_MS = 10_000


@contextmanager
def failing_fast() -> Iterator[None]:
    """End the process with exit code 1 on an error, with a traceback unless its message is enough.

    One of several processes ends at once: Python's normal exit would wait for the others, and they
    wait for this one in a collective. Errors of JAX take the normal exit all the same: most often
    they mean that another process is lost, and JAX then ends this one with exit code 134.

    A `ConfigError` in one of several processes ends all of them with exit code 2.
    """
    try:
        with _listening():
            yield
    except ConfigError as error:
        if jax.process_count() == 1:
            raise
        print_problems(error)
        coordinator().key_value_set(
            _REASON, f"process {jax.process_index()}: {error}", allow_overwrite=True
        )
        _leave()
    except Exception as error:
        is_explained = isinstance(error, EXPLAINED)
        is_one_of_several = jax.process_count() > 1
        if is_explained:
            print(redacted(f"error: {error}"), file=sys.stderr)
        elif not is_one_of_several or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        else:
            traceback.print_exc()
        if is_one_of_several:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(FAILED)
        raise SystemExit(FAILED) from None


@contextmanager
def _listening() -> Iterator[None]:
    """End this process when another one posts a reason, even while it is in a collective."""
    if jax.process_count() == 1:
        yield
        return
    closed = threading.Event()
    listener = threading.Thread(target=_listen, args=(closed,), name="config errors", daemon=True)
    listener.start()
    try:
        yield
    finally:
        closed.set()
        listener.join()  # the thread must not use JAX's client while it is torn down


def _listen(closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        try:
            reason = coordinator().key_value_try_get(_REASON)
        except jax.errors.JaxRuntimeError:
            continue  # no process has posted a reason
        print(f"\nconfig error in {reason}", file=sys.stderr)
        _leave()


def _leave() -> None:
    """End this process with exit code 2 once all have come here.

    Otherwise the end of the first one would look like a lost process to the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(jax.errors.JaxRuntimeError):  # a process is lost or stuck
        coordinator().wait_at_barrier(_REASON, _BARRIER_TIMEOUT_MS)
    if jax.process_index() == 0:
        time.sleep(1)  # the service that the other processes need runs here
    os._exit(CONFIG_ERROR)
