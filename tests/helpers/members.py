"""Start one training run as several processes on this machine, and always end them all."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from helpers.training_process import DEADLINE_SECONDS, TrainingProcess
from maxpipe.devices.cluster import free_port


@contextlib.contextmanager
def members(
    directory: Path,
    count: int,
    arguments: Sequence[str],
    name: str = "start",
    program: str | None = None,
) -> Iterator[list[TrainingProcess]]:
    """Start the processes of one run; kill those that are still running at the end.

    Args:
      directory: of the logs, `<name>-<index>.log`.
      count: number of processes.
      arguments: from `training_process.command`, the same for all.
      name: of this start, for the logs.
      program: as in `TrainingProcess`.
    """
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
            process = TrainingProcess(
                directory / f"{name}-{index}.log", arguments, environment, program
            )
            processes.append(stack.enter_context(process))
        yield processes


def ends(
    processes: Sequence[TrainingProcess], seconds: float = DEADLINE_SECONDS
) -> tuple[list[int], str]:
    """Wait for all processes, for so long each; return their exit codes and joined output."""
    codes = [process.wait(seconds) for process in processes]
    return codes, "\n".join(f"--- {process.log.name}\n{process.output}" for process in processes)
