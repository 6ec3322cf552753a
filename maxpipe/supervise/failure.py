"""End a process that cannot continue, and with it the other processes of the run."""

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import jax

from maxpipe.checkpoint.errors import CheckpointMismatch, CheckpointSaveError, ReadError
from maxpipe.config.cli import CONFIG_ERROR, print_problems
from maxpipe.config.errors import ConfigError, redacted
from maxpipe.devices import processes
from maxpipe.devices.processes import coordinator
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervise.ending import FAILED, LOST, PREEMPTED, announcers, leave, saying_if_possible
from maxpipe.supervise.process import HUNG, running
from maxpipe.telemetry.writers import TelemetryError


class MemoryTooSmall(Exception):
    """A device cannot hold what the run asks for; says what helps."""


# Errors whose messages say all that a user can act on.
EXPLAINED = (
    *(ReadError, CheckpointMismatch, CheckpointSaveError),
    *(LeaseLost, MemoryTooSmall, TelemetryError),
)

_OF_JAX = (jax.errors.JaxRuntimeError, MemoryTooSmall)
# Prefixes of JAX's errors that a lost process never causes.
_OWN_FAULTS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
_KINDS = {CONFIG_ERROR: "config error", PREEMPTED: "stopped", HUNG: "hung", LOST: "lost"}
_REASON = "maxpipe/end"  # key in the coordination service: exit code, and why the run ends
_FAILED_ALIKE = "maxpipe/failed"  # a barrier
_POLL_SECONDS = 1.0
_BARRIER_MS = 3_500  # `leave` gives all last acts 5 s


@contextmanager
def failing_fast(*, ends_process: bool = True) -> Iterator[None]:
    """End the process on an error; as one of several, end the others with the same code and reason.

    A `ConfigError` ends with exit code 2, any other error with 1, after a traceback unless its
    message is enough. Python's normal exit would wait for the other processes, which wait for this
    one. With `ends_process=False`, errors of a run with one process are left to the caller.
    """
    is_one_of_several = processes.count() > 1
    try:
        with _listening() if is_one_of_several else nullcontext(), ending_with_lost_process():
            yield
    except Exception as error:
        if not is_one_of_several and not (ends_process and isinstance(error, EXPLAINED)):
            raise
        _print(error)
        if is_one_of_several:
            code = CONFIG_ERROR if isinstance(error, ConfigError) else FAILED
            _announce(code, str(error))
            leave(code)
        raise SystemExit(FAILED) from None


@contextmanager
def ending_with_lost_process() -> Iterator[None]:
    """End one of several processes on a JAX error, before anything waits for the others.

    Most often another process is lost: exit code 134. The code is 1 if the error is this process's
    own, or if all have met one.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        # JAX raises a ValueError for an operation that another process's failure prevents.
        while cause is not None and not (
            isinstance(cause, _OF_JAX) or (isinstance(cause, ValueError) and "Gloo" in str(cause))
        ):
            cause = cause.__cause__
        if processes.count() == 1 or cause is None:
            raise
        is_own = isinstance(cause, MemoryTooSmall) or str(cause).startswith(_OWN_FAULTS)
        # While this waits, JAX may end the process, or the listener may with another one's reason,
        # compared to which this error would say nothing.
        is_alike = not is_own and _meet(_FAILED_ALIKE)
        _print(error)
        code = FAILED if is_own or is_alike else LOST
        if not is_alike:
            _announce(code, str(error))
        leave(code)


def _print(error: Exception) -> None:
    with saying_if_possible():
        if isinstance(error, ConfigError):
            print_problems(error)
        elif isinstance(error, EXPLAINED):
            print(redacted(f"error: {error}"), file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)


@contextmanager
def _listening() -> Iterator[None]:
    """End this process when another one posts a reason, even while it is in a collective."""
    announcers.append(_announce)
    try:
        with running(_listen, "ends"):  # which must not use JAX's client while it is torn down
            yield
    finally:
        announcers.remove(_announce)


def _listen(closed: threading.Event) -> None:
    while not closed.wait(_POLL_SECONDS):
        try:
            posted = coordinator().key_value_try_get(_REASON)
        except jax.errors.JaxRuntimeError:
            continue  # no process has posted a reason
        code, reason = json.loads(posted)
        with saying_if_possible():
            print(f"\n{_KINDS.get(code, 'error')} in {reason}", file=sys.stderr, flush=True)
            if code in (HUNG, LOST):
                faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        _meet(_REASON)
        leave(code)


def _announce(code: int, reason: str) -> None:
    """Post why this process leaves, and wait until all know it, or it would look like a loss."""
    text = json.dumps((code, redacted(f"process {processes.index()}: {reason}")))
    with suppress(jax.errors.JaxRuntimeError):  # process 0 is lost
        coordinator().key_value_set(_REASON, text, allow_overwrite=True)
    _meet(_REASON)


def _meet(name: str) -> bool:
    """Return whether all processes have come to a barrier in time; one that hangs does not."""
    try:
        coordinator().wait_at_barrier(name, _BARRIER_MS)
        return True
    except jax.errors.JaxRuntimeError:
        return False
    finally:
        if name == _REASON and processes.index() == 0:
            time.sleep(1)  # the service that the other processes need runs here
