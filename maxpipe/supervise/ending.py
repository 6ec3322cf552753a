"""Leave a process at once, whatever library threads still run, without losing what matters."""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from maxpipe.config.terminal import last_acts

FAILED = 1
LOST = 134  # as a shell reports SIGABRT, with which JAX ends a process that has lost another one

_LAST_ACTS_SECONDS = 5.0

# Functions that tell other processes the code and the reason with which this one leaves.
announcers: list[Callable[[int, str], None]] = []
# Threads that use a library which Python's exit would tear down; `run_command` skips it for them.
left_behind: list[threading.Thread] = []

# Lets writing fail: Ctrl-C ends the `tee` of a pipe as well, a terminal may be gone, and Python may
# have no such stream.
saying_if_possible = partial(suppress, OSError, ValueError, AttributeError)


def leave(code: int, reason: str = "") -> None:
    """End the process, without waiting for threads or for other processes.

    First the functions given to `at_end` are called, the latest first, for a few seconds at most.
    If there is a reason, the other processes of the run receive it and end with the same code.
    """
    threads = [threading.Thread(target=_finish, name="end", daemon=True)]
    for announce in announcers if reason else []:
        threads.append(threading.Thread(target=announce, args=(code, reason), daemon=True))
    for thread in threads:
        thread.start()
    until = time.monotonic() + _LAST_ACTS_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    os._exit(code)


def run_command(main: Callable[[], int]) -> None:
    """Call a command's `main` and end the process with its exit code.

    After a failure it leaves at once: a failed save may leave threads for which Python's normal
    exit would wait for minutes.
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
    if isinstance(code, int) and any(thread.is_alive() for thread in left_behind):
        if is_one_of_several():
            with suppress(Exception):  # waits for the others like Python's exit
                sys.modules["jax"].distributed.shutdown()
        leave(code)
    raise SystemExit(code)


def is_one_of_several() -> bool:
    """Return whether JAX has been started as one of several processes."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _finish() -> None:
    _flush()
    while last_acts:
        with suppress(Exception):
            last_acts.pop()()
        _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with saying_if_possible():
            stream.flush()


def die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return a function that a child calls so that Linux kills it when process `parent` dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # dead already
            os._exit(LOST)

    return prepare
