"""Start JAX: simulated devices, several processes.

No other module reads from the environment how processes find each other.
"""

import os
from functools import partial

import jax

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import derive_known
from maxpipe.config.rules.engines import check_processes
from maxpipe.config.sections import Config
from maxpipe.devices import processes
from maxpipe.devices.compile_cache import start_compile_cache
from maxpipe.devices.simulated import start_threads
from maxpipe.devices.transfers import start_transfers

# Variables by which JAX's own cluster detection finds a TPU pod, a multi-slice job, or an MPI
# launch.
CLUSTER_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")


def start_jax(config: Config) -> None:
    """Configure JAX before its first use: simulated devices, processes, the compilation cache.

    Raises:
      ConfigError: the environment's description of the processes is incomplete, they cannot share
        the simulated devices evenly, or do not fit the stages.
    """
    # Checked first: after `start_processes` the message would come only when all peers are there.
    check_processes(derive_known(config), announced_processes())
    if config.mesh.simulated_devices:
        devices = simulated_share(config.mesh.simulated_devices)
        jax.config.update("jax_num_cpu_devices", devices)
        start_threads(config, devices, announced_processes())
    start_processes(config.mesh.heartbeat_timeout_seconds)
    engine = ENGINES.get(derive_known(config).pipeline.engine)
    if processes.count() > 1 and engine and not engine.one_program:
        start_transfers()
    start_compile_cache(config)


def simulated_share(devices: int) -> int:
    """Return how many of the simulated devices belong to this process.

    Raises:
      ConfigError: the devices do not divide over the processes.
    """
    count = announced_processes()
    if devices % count:
        message = f"{devices} do not divide over {count} processes; take a multiple of {count}"
        raise ConfigError(Problem("mesh.simulated_devices", message))
    return devices // count


def announced_processes() -> int:
    """Return the number of processes in the environment; 1 where only JAX can detect it."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        return int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    return _num_slurm_tasks()


def job_of_process() -> tuple[str, int]:
    """Return name and attempt of the job that this process belongs to; ("", 0) without a job.

    A scheduler or launcher that starts a job again gives it the same name and a higher attempt,
    after the attempt before has ended. MAXPIPE_JOB and MAXPIPE_ATTEMPT, which the launchers set,
    take precedence over the variables of Slurm.
    """
    env = os.environ
    if "MAXPIPE_JOB" in env:
        return env["MAXPIPE_JOB"], _number(env.get("MAXPIPE_ATTEMPT", ""))
    if "SLURM_JOB_ID" in env:
        name = f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}"
        return name, _number(env.get("SLURM_RESTART_COUNT", ""))
    return "", 0


def start_processes(heartbeat_timeout: int) -> None:
    """Call `jax.distributed.initialize` if the environment names several processes.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID take precedence. JAX itself
    recognises TPU pods, and Slurm and MPI jobs of more than one task. With MAXPIPE_DISTRIBUTED=1 it
    looks further: on TPU VMs the facts are in the metadata server, not in the environment.

    Args:
      heartbeat_timeout: seconds of silence after which a process counts as lost; also how long a
        process waits for the others at the end.

    Raises:
      ConfigError: one of the variables is missing.
    """
    env = os.environ
    initialize = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=heartbeat_timeout,
    )
    if "JAX_COORDINATOR_ADDRESS" in env:
        missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
        if missing:
            names = " and ".join(missing)
            message = f"JAX_COORDINATOR_ADDRESS is set, so {names} must be set as well"
            raise ConfigError(Problem("", message))
        initialize(
            env["JAX_COORDINATOR_ADDRESS"],
            int(env["JAX_NUM_PROCESSES"]),
            int(env["JAX_PROCESS_ID"]),
        )
        return
    is_requested = env.get("MAXPIPE_DISTRIBUTED") == "1"
    is_pod = len(env.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
    is_cluster = _num_slurm_tasks() > 1 or any(name in env for name in CLUSTER_VARIABLES)
    if is_requested or is_pod or is_cluster:
        initialize()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _num_slurm_tasks() -> int:
    """Return the number of tasks of this process's Slurm job step; 1 outside of Slurm."""
    return int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
