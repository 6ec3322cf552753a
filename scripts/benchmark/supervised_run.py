"""Run training as several processes on this machine, and find them, for faults from outside."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "base.yml"
WAIT_SECONDS = 600.0


def small_model(processes: int) -> list[str]:
    """Return the words of a run of 62 thousand parameters, its batch shared by the processes."""
    return [
        "model.embed_dim=32",
        "model.num_query_heads=2",
        "model.num_kv_heads=2",
        "model.mlp_dim=64",
        "model.num_layers=2",
        f"mesh.simulated_devices={processes}",
        f"mesh.ici.data={processes}",
        "mesh.ici.stage=1",
        "mesh.ici.fsdp=1",
        "pipeline.engine=sequential",
        "pipeline.num_repeats=1",
        "data.sequence_length=32",
        "data.global_batch_size=8",
        "eval.every=0",
        "telemetry.log_every=1",
    ]


class Processes:
    """Processes of one run; a context manager that kills them at the end.

    Args:
      directory: of their logs, `process-<index>.log`.
      count: of processes.
      words: of `maxpipe.train`, after the configuration.
      supervisor: words of `maxpipe.supervise`; None for trainers without supervisors.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        words: Sequence[str],
        supervisor: Sequence[str] | None = (),
    ):
        self._logs = [directory / f"process-{index}.log" for index in range(count)]
        self._has_supervisors = supervisor is not None
        self._command = [sys.executable, "-m", "maxpipe.train", str(CONFIG), *words]
        if supervisor is not None:
            start = [sys.executable, "-m", "maxpipe.supervise", *supervisor, "--"]
            self._command = [*start, *self._command]
        with socket.create_server(("localhost", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._processes = [self._start(index) for index in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"localhost:{self._port}",
            "JAX_NUM_PROCESSES": str(len(self._logs)),
            "JAX_PROCESS_ID": str(index),
        }
        with self._logs[index].open("a") as output:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,  # where `-m` looks first
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,
            )

    def start_again(self) -> None:
        """Start those that have ended, as a launcher does."""
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                self._processes[index] = self._start(index)

    def kill(self, index: int) -> None:
        """Kill one: with a supervisor its trainer ends, too, soon after."""
        self._processes[index].kill()
        self._processes[index].wait()

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that this object has started: supervisors, if there are any."""
        return [process.pid for process in self._processes]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, None for those that run."""
        return [process.poll() for process in self._processes]

    @property
    def has_ended(self) -> bool:
        """Whether all have ended."""
        return None not in self.codes

    def output(self, index: int = 0) -> str:
        """Return what a process, and its supervisor, have printed."""
        return self._logs[index].read_text(errors="replace")

    def last_step(self) -> int:
        """Return the last step that process 0 has printed, 0 if there is none."""
        return ([0, *self._steps()])[-1]

    def highest_step(self) -> int:
        """Return the highest step that process 0 has ever printed, 0 if there is none."""
        return max(self._steps(), default=0)

    def _steps(self) -> list[int]:
        return [*map(int, re.findall(r"^step +(\d+)/", self.output(), re.MULTILINE))]

    def trainer(self, index: int) -> int | None:
        """Return the number of a trainer's process, None while there is none."""
        parent = self._processes[index].pid
        return child_of(parent) if self._has_supervisors else parent

    def send(self, index: int, number: int) -> bool:
        """Send a signal to a trainer; return whether there was one."""
        trainer = self.trainer(index)
        try:
            if trainer is not None:
                os.kill(trainer, number)
        except ProcessLookupError:
            return False
        return trainer is not None

    def wait_until_ended(self) -> list[int]:
        """Wait for all, as long as there are new steps; return their exit codes."""
        progress, until = None, 0.0
        while not self.has_ended:
            if progress != (now := (self.codes, self.highest_step())):
                progress, until = now, time.monotonic() + WAIT_SECONDS
            if time.monotonic() > until:
                raise TimeoutError(f"no step in {WAIT_SECONDS} s:\n{self.output()[-3000:]}")
            time.sleep(0.1)
        return [process.wait() for process in self._processes]


def child_of(parent: int) -> int | None:
    """Return the number of a process's child that is no zombie, None without one; Linux only."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            return int(stat.parent.name)
    return None


def wait_until(
    condition: Callable[[], bool], processes: Processes, every_seconds: float = 0.02
) -> None:
    """Wait until a function returns true; raise RuntimeError if the run ends before."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        if processes.has_ended:
            raise RuntimeError(f"ended with {processes.codes}:\n{processes.output()[-3000:]}")
        if time.monotonic() > until:
            raise TimeoutError(f"nothing in {WAIT_SECONDS} s:\n{processes.output()[-3000:]}")
        time.sleep(every_seconds)
