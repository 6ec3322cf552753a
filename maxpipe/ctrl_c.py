"""Prepare a command's process: UTF-8, a line for Ctrl-C outside `main`, stacks at SIGUSR1.

Every command calls `expect` before it imports anything else, so this file imports next to nothing.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_UTF8 = "PYTHONUTF8"
_INTERRUPTED = 130  # as in `maxpipe.config.terminal`, which takes time to import


def expect() -> None:
    """Let Ctrl-C end the process with one line and exit code 130 from now on, and texts be UTF-8.

    In a locale of another encoding, such as ASCII, Python begins again in its UTF-8 mode, because
    libraries take no path with letters that the encoding does not have.

    Nothing needs tidying up at that point. Python's own way is to raise an exception, which
    libraries that are being imported turn into other errors. If a shell has switched Ctrl-C off, as
    for a command in the background, it stays off.

    SIGUSR1 writes the stacks of all threads to standard error, whatever the main thread waits for.
    SIGUSR2, by default the end of a process, does nothing until a run takes it.
    """
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8) != "1":
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, _UTF8: "1"})


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of a command's `main`, in which Ctrl-C is an exception."""
    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    except KeyboardInterrupt:  # just before or after what `main` handles itself
        _end()


def _end(*_: object) -> NoReturn:
    """End the process; a signal handler."""
    try:
        os.write(2, b"\nstopped by Ctrl-C\n")
    finally:  # also if Ctrl-C has ended the reader of a pipe
        os._exit(_INTERRUPTED)
