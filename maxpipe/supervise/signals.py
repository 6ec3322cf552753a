"""Stop at SIGTERM and Ctrl-C: all processes finish the same step, save, and end."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

from maxpipe.config.terminal import INTERRUPTED
from maxpipe.supervise.ending import is_one_of_several, leave, saying_if_possible

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h

_IGNORE = 1  # SIG_IGN of C

Handler = Callable[[int, FrameType | None], object] | int | None


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

    A thread reads signals from a pipe: Python's own handlers run in the main thread, which may sit
    in a compilation or in a collective that never ends.

    With several processes, JAX's preemption service agrees on the step at which all stop; it takes
    over SIGTERM, which `share_with_jax` takes back and passes on.
    """

    def __init__(
        self, on_request: Callable[[], None] = lambda: None, *, ends_process: bool = True
    ) -> None:
        self._on_request, self._ends_process = on_request, ends_process
        self._handler_of_jax: Callable[[int], None] | None = None
        self._signal: int | None = None
        self._begun = self._listens = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _print("signals are left alone in a thread: neither Ctrl-C nor SIGTERM saves first")
        elif not self._ends_process:
            # With several processes, JAX's preemption service already runs and handles SIGTERM.
            numbers = [signal.SIGINT] if is_one_of_several() else [signal.SIGINT, signal.SIGTERM]
            self._stack.enter_context(handling(numbers, self._raise))
        else:
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._stack.callback(os.close, write)  # ends the thread
            self._stack.enter_context(handling([signal.SIGTERM, signal.SIGINT], _do_nothing))
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
        address = libc.signal(signal.SIGTERM, ctypes.c_void_p(_IGNORE))
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

    @property
    def exit_code(self) -> int:
        return stop_code(self._signal)

    def _listen(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as signals:
            while received := signals.read(1):
                if (number := received[0]) not in (signal.SIGTERM, signal.SIGINT):
                    continue
                if self._ends_now(number):
                    when = "again" if self._begun else "before the first step"
                    why = f"{signal.Signals(number).name} {when}: nothing is saved"
                    _print(why)
                    leave(stop_code(number), why)
                self._ask(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._ends_now(number):
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(PREEMPTED)
        self._ask(number)

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
