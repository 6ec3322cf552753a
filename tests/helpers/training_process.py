"""Starts `python -m maxpipe.train` on a tiny model as a process, watches its output, and always ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.runs import rows

BASE = Path(__file__).parents[2] / "configs" / "base.yml"
DEADLINE_SECONDS = 240  # of anything a test waits for; a busy machine takes long to import JAX

TINY = (
    "model.embed_dim=16",
    "model.num_query_heads=2",
    "model.num_kv_heads=2",
    "model.mlp_dim=32",
    "data.source=synthetic",
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "eval.every=0",
    "telemetry.log_every=1",
)


def command(output_dir, *words):
    """Arguments of a tiny run after the interpreter's."""
    return [str(BASE), *TINY, f"output_dir={output_dir}", *words]


class TrainingProcess:
    """A running command whose output goes to a file; a context manager that kills what is left of it.

    Args:
      log: the file.
      arguments: from `command`.
      environment: added to this process's.
      program: Python code to run instead of `-m maxpipe.train`; finds the arguments in sys.argv.
    """

    def __init__(self, log, arguments, environment=None, program=None):
        self.log = Path(log)
        start = ["-m", "maxpipe.train"] if program is None else ["-c", program]
        with self.log.open("w") as output:
            # A session of its own, so that a signal to the group reaches worker processes, but not
            # this one.
            self._process = subprocess.Popen(
                [sys.executable, *start, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, text):
        """Returns when `text` is in the output."""
        until = time.monotonic() + DEADLINE_SECONDS
        while text not in self.output:
            assert self._process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < until, f"no {text!r}:\n{self.output}"
            time.sleep(0.02)

    def send(self, number):
        self._process.send_signal(number)

    def send_to_group(self, number):
        os.killpg(self._process.pid, number)

    def wait(self):
        """The exit code, negative for a signal."""
        return self._process.wait(DEADLINE_SECONDS)


def run(log, arguments, **options):
    """Runs a command to its end: (exit code, output)."""
    with TrainingProcess(log, arguments, **options) as process:
        return process.wait(), process.output


def steps_of(output_dir, key="loss"):
    """{step: value} of the rows of metrics.jsonl that have the key."""
    return {row["step"]: row[key] for row in rows(Path(output_dir) / "base") if key in row}
