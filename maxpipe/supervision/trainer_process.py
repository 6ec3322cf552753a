"""Run a trainer as a process that is ended with all its children, and by force if need be.

Imports no JAX.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from maxpipe.supervision.ending import die_with_parent

_STACKS_SECONDS = 5.0  # from SIGABRT, after which a trainer writes its stacks, to SIGKILL


class TrainerProcess:
    """A running trainer, in a session of its own.

    Args:
      command: the command with its arguments.
      environment: variables added to this process's environment.

    Raises:
      OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from the supervisor
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._abort_at = self._kill_at = float("inf")

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs; end it if due."""
        code = self._process.poll()
        if code is not None:
            self._kill_group()  # worker processes may outlive it
            return code
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_group()
        elif now >= self._abort_at:
            self._abort_at, self._kill_at = float("inf"), now + _STACKS_SECONDS
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads
        return None

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end_within(self, seconds: float) -> None:
        """Let `poll` end it after some seconds, if it has not ended by itself."""
        self._abort_at = min(self._abort_at, time.monotonic() + seconds)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
