"""Answer Ctrl-C outside of a command's `main`, as during its imports, by a line, no traceback.

Every command calls `expect` before it imports anything else, so this file imports next to nothing.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_INTERRUPTED = 130  # `maxpipe.config.terminal` has it, too, which takes time to import


def expect() -> None:
    """Let Ctrl-C end the process with one line and exit code 130 from now on.

    Nothing has to be tidied up then. Python's own way is an exception, of which libraries that are
    just being imported make other errors. A shell that starts a command in the background may have
    switched Ctrl-C off; so it stays.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of a command's `main`, in which Ctrl-C is an exception."""
    try:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(main())
    except KeyboardInterrupt:  # just before or after what `main` handles itself
        _end()


def _end(*_: object) -> NoReturn:
    """End the process; a handler of signals."""
    try:
        os.write(2, b"\nstopped by Ctrl-C\n")
    finally:  # also if Ctrl-C has ended the reader of a pipe
        os._exit(_INTERRUPTED)
