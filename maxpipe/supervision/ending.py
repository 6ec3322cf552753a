"""Leave a process at once, whatever threads libraries have left, without losing what matters."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FAILED = 1

_LAST_ACTS_SECONDS = 5.0

_last_acts: list[Callable[[], None]] = []


@contextmanager
def at_end(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once: at the end of the context, or before `leave` ends the process within it."""
    _last_acts.append(act)
    try:
        yield
    finally:
        # `leave` may have taken it, in another thread.
        with suppress(ValueError):
            _last_acts.remove(act)
            act()


def leave(code: int) -> None:
    """End the process with an exit code, without waiting for threads or for other processes.

    What `at_end` was given is called first, the latest first, and the streams are flushed. A call
    that hangs is left behind after a few seconds.
    """
    finisher = threading.Thread(target=_finish, name="end", daemon=True)
    finisher.start()
    finisher.join(_LAST_ACTS_SECONDS)
    os._exit(code)


def run_command(main: Callable[[], int]) -> None:
    """Call a command's `main` and end the process with its exit code.

    After a failure the process leaves at once: Python's normal exit waits for threads, and a failed
    save may leave some that wait for minutes. With several processes an error that `main` does not
    handle takes the normal exit, see `failure.failing_fast`.
    """
    try:
        code: object = main()
    except SystemExit as end:
        code = end.code
    except Exception:
        if is_one_of_several():
            raise
        traceback.print_exc()
        code = FAILED
    if code == FAILED:
        leave(FAILED)
    raise SystemExit(code)


def is_one_of_several() -> bool:
    """Return whether JAX has been started as one of several processes."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _finish() -> None:
    _flush()
    while _last_acts:
        with suppress(Exception):
            _last_acts.pop()()
        _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, or None
            stream.flush()
