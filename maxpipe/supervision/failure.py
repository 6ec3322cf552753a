"""End a process that cannot continue, and with it the other processes of the run."""

import json
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
from maxpipe.devices import processes
from maxpipe.devices.processes import coordinator
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervision.ending import FAILED, leave
from maxpipe.telemetry.sink import TelemetryError

# Errors whose messages say all that a user can act on.
EXPLAINED = (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointSaveError,
    CheckpointUnreadable,
    LeaseLost,
    TelemetryError,
)

_REASON = "maxpipe/end"  # in the store of the coordination service: exit code, and why the run ends
_POLL_SECONDS = 1.0
_BARRIER_TIMEOUT_MS = 7_000
_ABORT_SECONDS = 2.0  # within which JAX ends this process if another one is lost


@contextmanager
def failing_fast(*, ends_process: bool = True) -> Iterator[None]:
    """End the process with exit code 1 on an error, with a traceback unless its message is enough.

    An error that explains itself in one of several processes ends all of them with that reason: a
    `ConfigError` with exit code 2, one of `EXPLAINED` with 1. After any other error one of several
    processes ends at once: Python's normal exit would wait for the others, and they wait for this
    one in a collective. Errors of JAX take the normal exit all the same: most often they mean that
    another process is lost, and JAX then ends this one with exit code 134.

    Args:
      ends_process: if false, errors of a run with one process are left to the caller.
    """
    try:
        with _listening():
            yield
    except ConfigError as error:
        if processes.count() == 1:
            raise
        print_problems(error)
        _end_all(CONFIG_ERROR, error)
    except Exception as error:
        is_one_of_several = processes.count() > 1
        if not (is_one_of_several or ends_process):
            raise
        if isinstance(error, EXPLAINED):
            print(redacted(f"error: {error}"), file=sys.stderr, flush=True)
            if is_one_of_several:
                if _comes_from_jax(error):
                    time.sleep(_ABORT_SECONDS)
                _end_all(FAILED, error)
            raise SystemExit(FAILED) from None
        if not is_one_of_several or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        traceback.print_exc()
        leave(FAILED)


def _comes_from_jax(error: BaseException | None) -> bool:
    """Return whether an error was raised from one of JAX, such as that of a lost process."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__
    return False


@contextmanager
def _listening() -> Iterator[None]:
    """End this process when another one posts a reason, even while it is in a collective."""
    if processes.count() == 1:
        yield
        return
    closed = threading.Event()
    listener = threading.Thread(target=_listen, args=(closed,), name="ends", daemon=True)
    listener.start()
    try:
        yield
    finally:
        closed.set()
        listener.join()  # the thread must not use JAX's client while it is torn down


def _listen(closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        try:
            posted = coordinator().key_value_try_get(_REASON)
        except jax.errors.JaxRuntimeError:
            continue  # no process has posted a reason
        code, reason = json.loads(posted)
        kind = "config error" if code == CONFIG_ERROR else "error"
        print(f"\n{kind} in {reason}", file=sys.stderr)
        _leave_together(code)


def _end_all(code: int, error: Exception) -> None:
    """Post why this process ends, and leave with the others."""
    reason = json.dumps((code, redacted(f"process {processes.index()}: {error}")))
    coordinator().key_value_set(_REASON, reason, allow_overwrite=True)
    _leave_together(code)


def _leave_together(code: int) -> None:
    """End this process once all have come here.

    Otherwise the end of the first one would look like a lost process to the others.
    """
    with suppress(jax.errors.JaxRuntimeError):  # a process is lost or stuck
        coordinator().wait_at_barrier(_REASON, _BARRIER_TIMEOUT_MS)
    if processes.index() == 0:
        time.sleep(1)  # the service that the other processes need runs here
    leave(code)
