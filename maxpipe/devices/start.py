"""Starting JAX: simulated devices, several processes, the compilation cache.

The one place that reads the environment for how processes find each other.
"""

import os
from pathlib import Path
from typing import Any

import jax

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import derive_known
from maxpipe.config.rules.engines import check_processes
from maxpipe.config.sections import Config
from maxpipe.devices.simulated import start_threads, uses_cache

# Variables by which JAX's own cluster detection finds a TPU pod, a multi-slice job, or an MPI
# launch.
CLUSTER_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")


def start_jax(config: Config) -> None:
    """Configures JAX before its first use: simulated devices, several processes, the compilation cache.

    Raises:
      ConfigError: the environment's description of the processes is incomplete, they cannot share
        the simulated devices evenly, or there are several for an engine that has one.
    """
    # Whoever waits for peers first would say it only when all of them have come.
    check_processes(derive_known(config), announced_processes())
    if config.mesh.simulated_devices:
        devices = simulated_share(config.mesh.simulated_devices)
        jax.config.update("jax_num_cpu_devices", devices)
        start_threads(config, devices, announced_processes())
    start_processes(config.mesh.heartbeat_timeout_seconds)
    start_compile_cache(config)


def start_compile_cache(config: Config) -> None:
    """Uses the persistent compilation cache, if it is not off and programs from files run here."""
    cache = compile_cache(config)
    if cache is None or not uses_cache(config):
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_cache(config: Config) -> Path | None:
    """Directory of the persistent compilation cache, or None if it is off."""
    if config.compile.cache_dir == "off":
        return None
    return Path(config.compile.cache_dir or Path(config.output_dir) / "compile_cache").absolute()


def simulated_share(devices: int) -> int:
    """Devices that this process simulates of all that the run asks for.

    Raises:
      ConfigError: they do not divide over the processes.
    """
    processes = announced_processes()
    if devices % processes:
        message = (
            f"{devices} do not divide over {processes} processes; take a multiple of {processes}"
        )
        raise ConfigError(Problem("mesh.simulated_devices", message))
    return devices // processes


def announced_processes() -> int:
    """Processes that the environment names; 1 where JAX finds them out by itself."""
    several = "JAX_COORDINATOR_ADDRESS" in os.environ
    return int(os.environ.get("JAX_NUM_PROCESSES", "1")) if several else _num_slurm_tasks()


def start_processes(heartbeat_timeout: int) -> None:
    """`jax.distributed.initialize` if the environment says that this process is one of several.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID decide; TPU pods, Slurm and
    MPI jobs of more than one task are recognised by JAX itself. MAXPIPE_DISTRIBUTED=1 leaves all of
    it to JAX: on TPU VMs the facts are in the metadata server, not in the environment.

    Args:
      heartbeat_timeout: seconds of silence after which a process counts as lost; also how long one
        waits for the others at the end.

    Raises:
      ConfigError: one of the variables is missing.
    """
    env = os.environ
    limit = heartbeat_timeout
    timeouts: dict[str, Any] = {
        "heartbeat_timeout_seconds": limit,
        "shutdown_timeout_seconds": limit,
    }
    if "JAX_COORDINATOR_ADDRESS" in env:
        missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
        if missing:
            names = " and ".join(missing)
            raise ConfigError(
                Problem("", f"JAX_COORDINATOR_ADDRESS is set, so {names} must be set as well")
            )
        rank = int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
        jax.distributed.initialize(env["JAX_COORDINATOR_ADDRESS"], *rank, **timeouts)
        return
    pod = len(env.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
    asked = env.get("MAXPIPE_DISTRIBUTED") == "1"
    if asked or pod or _num_slurm_tasks() > 1 or any(name in env for name in CLUSTER_VARIABLES):
        jax.distributed.initialize(**timeouts)


def _num_slurm_tasks() -> int:
    """Tasks of the Slurm job step that this process belongs to; 1 outside of one."""
    return int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
