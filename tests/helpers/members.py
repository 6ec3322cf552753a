"""Starts one training as several processes on this machine, and always ends them all."""

import contextlib
import socket

from helpers.training_process import TrainingProcess


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def members(directory, count, arguments, name="start", program=None):
    """The processes of one run, each with its own log; what is left of them at the end is killed.

    Args:
      directory: where the logs go, `<name>-<index>.log`.
      count: number of processes.
      arguments: from `training_process.command`, the same for all.
      name: of this start.
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
            }
            process = TrainingProcess(
                directory / f"{name}-{index}.log", arguments, environment, program
            )
            processes.append(stack.enter_context(process))
        yield processes


def ends(processes):
    """All exit codes and all output."""
    codes = [process.wait() for process in processes]
    return codes, "\n".join(f"--- {process.log.name}\n{process.output}" for process in processes)
