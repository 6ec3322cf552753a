"""Guard a command's output and its end: closed pipes, full disks, narrow encodings, Ctrl-C."""

import errno
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from maxpipe.config.errors import redacted

INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a filter whose reader has exited
GREEN, RESET = "\x1b[32m", "\x1b[0m"

last_acts: list[Callable[[], None]] = []  # registered by `at_end`, called by `leave`

Note = Callable[[str], None]  # takes a line for the user, such as an automatic decision


def ignore_note(text: str) -> None:
    """Drop a line that nothing should print."""


def printable(text: str) -> str:
    """Return a line in which nothing steers a terminal: an escape character is shown as \\x1b."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def wants_colour(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal that shows colours; see https://no-color.org."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of a terminal, 120 if it does not know; None for files and pipes."""
    return shutil.get_terminal_size((120, 24)).columns if stream.isatty() else None


def folded(text: str, width: int | None) -> str:
    """Break lines that are longer than a width between words, but not commands in backquotes."""
    if width is None:
        return text
    text = re.sub("`[^`\\n]*`", lambda command: command[0].replace(" ", "\0"), text)
    wrap = textwrap.TextWrapper(
        width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(line) for line in text.split("\n")).replace("\0", " ")


@contextmanager
def at_end(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` once: at the end of the context, or before a signal ends the process within it.

    The latter is done by `maxpipe.supervise.ending.leave`.
    """
    last_acts.append(act)
    try:
        yield
    finally:
        # `leave` may have taken it, in another thread.
        with suppress(ValueError):
            last_acts.remove(act)
            act()


@contextmanager
def no_tracebacks() -> Iterator[None]:
    """End a command without a traceback when its output's reader has exited, or after Ctrl-C.

    Characters that standard output cannot show are written as escapes, such as `\\xe9`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(CLOSED_PIPE) from None
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        # Otherwise the interpreter's own flush at exit fails and changes the exit code.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                _discard(stream)


def emit(text: str, stream: TextIO | None = None) -> None:
    """Print lines of a run, by default to standard output, without the secrets in URLs.

    Text and newline are one write, even without buffers (`PYTHONUNBUFFERED`), since other processes
    may write to the same console. A console that cannot be written to must not end the run: if its
    reader has exited, or its disk is full, standard error gets one line.
    """
    stream = stream or sys.stdout
    try:
        print(f"{redacted(text)}\n", end="", file=stream, flush=True)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EPIPE:
            _discard(stream)
        elif stream in _FAILED:
            return
        _FAILED.append(stream)
        with suppress(OSError):
            message = f"warning: standard output cannot be written: {reason}; the run continues"
            print(message, file=sys.stderr, flush=True)


_FAILED: list[TextIO] = []  # streams that standard error has a warning about


def _discard(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
