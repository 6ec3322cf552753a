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
        train = [sys.executable, "-m", "maxpipe.train", str(CONFIG), *words]
        if supervisor is not None:
            train = [sys.executable, "-m", "maxpipe.supervise", *supervisor, "--", *train]
        with socket.create_server(("localhost", 0)) as probe:
            port = probe.getsockname()[1]
        self._processes = []
        for index, log in enumerate(self._logs):
            environment = {
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            with log.open("a") as output:
                self._processes.append(
                    subprocess.Popen(
                        train,
                        stdout=output,
                        stderr=output,
                        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

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
        return int(([0, *re.findall(r"^step +(\d+)/", self.output(), re.MULTILINE)])[-1])

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
        """Wait for all; return their exit codes."""
        return [process.wait(WAIT_SECONDS) for process in self._processes]


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


def wait_until(condition: Callable[[], bool], processes: Processes) -> None:
    """Wait until a function returns true; raise RuntimeError if the run ends before."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        if processes.has_ended:
            raise RuntimeError(f"ended with {processes.codes}:\n{processes.output()[-3000:]}")
        if time.monotonic() > until:
            raise TimeoutError(processes.output()[-3000:])
        time.sleep(0.02)
