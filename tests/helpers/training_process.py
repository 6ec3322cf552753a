"""Train a tiny model with `maxpipe.train`, here or in processes that are always ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from helpers.commands import exit_code
from helpers.runs import last_words, rows
from maxpipe import train
from maxpipe.devices.cluster import free_port

BASE = Path(__file__).parents[2] / "configs" / "base.yml"
DEADLINE_SECONDS = 240  # of every wait: importing JAX is slow on a busy machine

TINY_MODEL = (
    "model.embed_dim=16",
    "model.num_query_heads=2",
    "model.num_kv_heads=2",
    "model.mlp_dim=32",
)
TINY = (
    *TINY_MODEL,
    "data.source=synthetic",
    "data.sequence_length=16",
    "data.global_batch_size=8",
    "eval.every=0",
    "telemetry.log_every=1",
)
# A model of one layer without a pipeline; `mesh.ici.data` is the number of devices.
ONE_LAYER = (
    *("mesh.ici.stage=1", "mesh.ici.fsdp=1", "model.num_layers=1"),
    *("pipeline.engine=sequential", "pipeline.num_repeats=1"),
)
# On all devices that the test process has.
DATA_PARALLEL = (
    "mesh.simulated_devices=0",
    "mesh.ici.data=8",
    "mesh.ici.stage=1",
    "mesh.ici.fsdp=1",
)


def command(output_dir: str | Path, *words: str) -> list[str]:
    """Return the arguments of `maxpipe.train` for a tiny run; the last word for a key counts."""
    return last_words([str(BASE), *TINY, f"output_dir={output_dir}", *words])


def train_here(output_dir: str | Path, *words: str) -> Any:
    return exit_code(train.main, command(output_dir, *DATA_PARALLEL, *words))


@contextlib.contextmanager
def inherited(number: int, handler: signal.Handlers) -> Iterator[None]:
    """Let processes that begin within start with this handling of a signal.

    The tests may run under nohup, which has SIGHUP ignored.
    """
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


class TrainingProcess:
    """Run `-m maxpipe.train`, or a Python program, with its output in a file; kill it at the end.

    Variables of the environment that are None are left out.
    """

    def __init__(
        self,
        log: str | Path,
        arguments: Sequence[str],
        environment: Mapping[str, str | None] | None = None,
        program: str | None = None,
    ):
        self.log = Path(log)
        start = ["-m", "maxpipe.train"] if program is None else ["-c", program]
        variables = {**os.environ, **(environment or {})}
        with self.log.open("w") as output:
            # A new session: a signal to its group reaches worker processes, but not this process.
            self._process = subprocess.Popen(
                [sys.executable, *start, *last_words(arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        while text not in self.output:
            assert self._process.poll() is None, f"ended before {text!r}:\n{self.output}"
            assert time.monotonic() < until, f"no {text!r}:\n{self.output}"
            time.sleep(0.02)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float = DEADLINE_SECONDS) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        return self._process.wait(seconds)


def run(
    log: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    program: str | None = None,
) -> tuple[int, str]:
    with TrainingProcess(log, arguments, environment, program) as process:
        return process.wait(), process.output


def steps_of(output_dir: str | Path, key: str = "loss") -> dict[int, Any]:
    """Return step -> value of the rows of metrics.jsonl that have `key`."""
    return {row["step"]: row[key] for row in rows(Path(output_dir) / "base") if key in row}


@contextlib.contextmanager
def members(
    directory: Path,
    count: int,
    arguments: Sequence[str],
    name: str = "start",
    program: str | None = None,
) -> Iterator[list[TrainingProcess]]:
    """Start the processes of one run, with logs `<name>-<index>.log`; kill them at the end."""
    address = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(count):
            environment = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "NPROC": None,  # so that they have as many threads as they ask for
            }
            log = directory / f"{name}-{index}.log"
            process = TrainingProcess(log, arguments, environment, program)
            processes.append(stack.enter_context(process))
        yield processes


def ends(
    processes: Sequence[TrainingProcess], seconds: float = DEADLINE_SECONDS
) -> tuple[list[int], str]:
    """Wait for all processes, for so long each; return their exit codes and joined output."""
    codes = [process.wait(seconds) for process in processes]
    return codes, "\n".join(f"--- {process.log.name}\n{process.output}" for process in processes)


def ended(
    processes: Sequence[TrainingProcess], codes: list[int], seconds: float = DEADLINE_SECONDS
) -> str:
    actual, output = ends(processes, seconds)
    assert actual == codes, output
    return output


def output_of(
    directory: Path,
    arguments: Sequence[str],
    codes: list[int],
    name: str = "start",
    program: str | None = None,
) -> str:
    """Run the processes of one run to their end, one for each exit code that is expected."""
    with members(directory, len(codes), arguments, name, program) as started:
        return ended(started, codes)


SUPERVISED = """
import sys
from maxpipe.supervise.__main__ import main
train = [sys.executable, "-m", "maxpipe.train", *sys.argv[1:]]
sys.exit(main(["--pause", "0.1", "--", *train]))
"""  # a program for `members`


def trainer_of(supervisor: int) -> int:
    """Return the process number of a supervisor's trainer, once it runs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == supervisor and fields[0] != "Z":
                return int(stat.parent.name)
        time.sleep(0.05)
    raise AssertionError(f"supervisor {supervisor} has no trainer")
