"""End a process: at signals after a step and a save, or at once. Imports no JAX beforehand."""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Self

from maxpipe.config.terminal import INTERRUPTED, last_acts

FAILED = 1
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
INQUIRIES = signal.SIGUSR1, signal.SIGUSR2  # that ask for stacks, or for a trace
LOST = 134  # as a shell reports SIGABRT, with which JAX ends a process that has lost another one

_LAST_ACTS_SECONDS = 5.0
_HANDLED = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], object] | int | None

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
    """Return a function that a child calls so that Linux kills it when process `parent` dies.

    Signals that ask for stacks or a trace do nothing until the child handles them.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
        for number in INQUIRIES:
            signal.signal(number, signal.SIG_IGN)  # until the command handles it
        if os.getppid() != parent:  # dead already
            os._exit(LOST)

    return prepare


def numbers_to_pass_on() -> list[signal.Signals]:
    """Return the signals that ask to stop: also SIGHUP, of a closed terminal, except under nohup.

    It is to be passed on as SIGTERM: itself it would kill a run.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGHUP, signal.SIGTERM, signal.SIGINT][is_ignored:]


@contextmanager
def handling(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle signals within the context; only the main thread can.

    Ctrl-C, whose previous handler raises, should be last: it is the first to be restored.
    """
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in reversed(previous.items()):
            signal.signal(number, before)


class Interruption:
    """Asks the loop to stop after the current step; inert until it is entered as a context manager.

    SIGTERM (exit code 75) and the first Ctrl-C (130) ask for it, and call `on_request` in another
    thread. A second Ctrl-C ends the process at once, and so does either signal before `begin`, when
    there is nothing to save yet; unless `ends_process`, they raise KeyboardInterrupt or SystemExit.

    SIGUSR2 asks for a profiler trace of the next steps.

    A thread reads signals from a pipe: Python's own handlers run in the main thread, which may sit
    in a compilation or in a collective that never ends.

    With several processes, JAX's preemption service agrees on the step at which all stop; it takes
    over SIGTERM, which `share_with_jax` takes back and passes on.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None, *, ends_process: bool = True):
        self._on_request, self._ends_process = on_request, ends_process
        self._handler_of_jax: Callable[[int], None] | None = None
        self._signal: int | None = None
        self._begun = self._listens = self._wants_trace = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _print("signals are left alone in a thread: neither Ctrl-C nor SIGTERM saves first")
        elif not self._ends_process:
            # With several processes, JAX's preemption service already runs and handles SIGTERM.
            numbers = [n for n in _HANDLED if n != signal.SIGTERM or not is_one_of_several()]
            self._stack.enter_context(handling(numbers, self._raise))
        else:
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._stack.callback(os.close, write)  # ends the thread
            self._stack.enter_context(handling(_HANDLED, _do_nothing))
            previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._stack.callback(signal.set_wakeup_fd, previous)
            threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
            self._listens = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def share_with_jax(self) -> None:
        """Take SIGTERM back from JAX, whose note for the loop is never read by one that hangs."""
        if not self._listens or not is_one_of_several():
            return
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        # Python knows only its own handlers, so C's `signal` has to say which one JAX has set.
        address = libc.signal(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_IGN)))
        signal.signal(signal.SIGTERM, _do_nothing)
        self._handler_of_jax = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)

    def begin(self) -> None:
        """Make signals wait for a step and a save from now on."""
        self._begun = True

    def after(self, step: int) -> bool:
        """Return whether to stop with `step` finished steps, alike in all processes."""
        import jax

        if jax.process_count() == 1:
            return self._signal is not None
        from jax.experimental import multihost_utils

        return multihost_utils.reached_preemption_sync_point(step)

    def take_trace_request(self) -> bool:
        """Return whether a trace was asked for since the last call."""
        asked, self._wants_trace = self._wants_trace, False
        return asked

    @property
    def exit_code(self) -> int:
        return stop_code(self._signal)

    def _listen(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as signals:
            while received := signals.read(1):
                if (number := received[0]) == signal.SIGUSR2:
                    self._ask_for_trace()
                if number not in (signal.SIGTERM, signal.SIGINT):
                    continue
                if self._ends_now(number):
                    when = "again" if self._begun else "before the first step"
                    why = f"{signal.Signals(number).name} {when}: nothing more is saved; "
                    why += "the next start goes on from the last checkpoint, if any"
                    _print(why)
                    leave(stop_code(number), why)
                self._ask(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            return self._ask_for_trace()
        if self._ends_now(number):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(PREEMPTED)
        self._ask(number)

    def _ask_for_trace(self) -> None:
        _print("SIGUSR2: the next steps are traced, into profile/ of the run's directory")
        self._wants_trace = True

    def _ends_now(self, number: int) -> bool:
        return not self._begun or number == self._signal == signal.SIGINT

    def _ask(self, number: int) -> None:
        if self._signal != signal.SIGINT:
            self._signal = number
        self._on_request()
        if self._handler_of_jax is not None:
            self._handler_of_jax(signal.SIGTERM)
        name = signal.Signals(number).name
        _print(f"{name}: finishing the step and saving; Ctrl-C twice stops at once")


def stop_code(number: int | None) -> int:
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing: the interpreter writes to the pipe only if a Python handler exists."""


def _print(text: str) -> None:
    """Write to standard error without Python's buffers, whose locks the main thread may hold."""
    with saying_if_possible():
        os.write(2, f"\n{text}\n".encode())
