"""Keep the process that renders chat templates: start it, ask it, and start another if it ends.

Templates are programs of strangers: in a process of their own they can neither run without end nor
take all memory. Every process of a run that reads conversations, such as a worker of the loader,
has one. It ends with its parent, however that ends, because its standard input does.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxpipe.config.imports import optional

SECONDS = 10.0  # of processor time for a conversation
_SCRIPT = Path(__file__).with_name("template_renderer.py")


class ProcessEnded(Exception):
    """The process ended instead of answering; the message says why."""


class _Renderer(NamedTuple):
    """A process that renders, and the one that it belongs to, which may since have been forked."""

    owner: int
    process: "subprocess.Popen[bytes]"


_lock = threading.Lock()
_renderer: _Renderer | None = None


def ask(request: Mapping[str, object]) -> dict[str, Any]:
    """Return the answer of `maxpipe.data.template_renderer` to a request: a text and the start and
    end of its `spans`, or what is wrong under `template` or `document`. Raises ProcessEnded if it
    takes too much time, or the process was ended.
    """
    line = json.dumps({**request, "seconds": SECONDS}).encode() + b"\n"
    with _lock:
        for _ in range(2):  # something else may have ended it
            process = _start()
            content = b""
            try:
                content = _exchange(process, line)
            finally:
                if not content:  # also after Ctrl-C: a late answer would be another's
                    _stop()
            if content:
                answer: dict[str, Any] = json.loads(content)
                return answer
            if process.returncode == -signal.SIGPROF:
                raise ProcessEnded(f"more than {SECONDS:g} s of processor time")
    with optional("jinja2", "chat", "data.source"):
        import jinja2  # noqa: F401
    raise ProcessEnded(f"its process ends with code {process.returncode}")


def _exchange(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """Return the line with which the process answers a line; b"" once it has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        content = process.stdout.readline()
        if content.endswith(b"\n"):
            return content
    except BrokenPipeError:
        pass
    process.wait()
    return b""


def _start() -> "subprocess.Popen[bytes]":
    """Return the process of this process, started if need be."""
    global _renderer
    if _renderer is None or _renderer.owner != os.getpid():
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            bufsize=1 << 16,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        _renderer = _Renderer(os.getpid(), process)
    return _renderer.process


@atexit.register
def _stop() -> None:
    """End the process, if it is one of this process."""
    global _renderer
    if _renderer is not None and _renderer.owner == os.getpid():
        _renderer.process.kill()
        _renderer.process.communicate()
    _renderer = None
