"""Starting JAX, and the device mesh with its axes data, stage, fsdp, context, tensor and expert.

The one place that reads the environment for how processes find each other.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, PartitionSpec

from maxpipe.config.devices import STEPS, unknown_axes
from maxpipe.config.engine_options import one_process
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.steps import run_steps
from maxpipe.simulated_devices import start_threads, uses_cache

# Variables by which JAX's own cluster detection finds a TPU pod, a multi-slice job, or an MPI launch.
CLUSTER_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")


def start_jax(config: Config) -> None:
    """Configures JAX before its first use: simulated devices, several processes, the compilation cache.

    Raises:
      ConfigError: the environment's description of the processes is incomplete, they cannot share the simulated
        devices evenly, or there are several for an engine that has one.
    """
    # Whoever waits for peers first would say it only when all of them have come.
    one_process(run_steps(STEPS, config, unknown_axes(config))[0], announced_processes())
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
        message = f"{devices} do not divide over {processes} processes; take a multiple of {processes}"
        raise ConfigError(Problem("mesh.simulated_devices", message))
    return devices // processes


def announced_processes() -> int:
    """Processes that the environment names; 1 where JAX finds them out by itself."""
    several = "JAX_COORDINATOR_ADDRESS" in os.environ
    return int(os.environ.get("JAX_NUM_PROCESSES", "1")) if several else _num_slurm_tasks()


def start_processes(heartbeat_timeout: int) -> None:
    """`jax.distributed.initialize` if the environment says that this process is one of several.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID decide; TPU pods, Slurm and MPI jobs of more
    than one task are recognised by JAX itself. MAXPIPE_DISTRIBUTED=1 leaves all of it to JAX: on TPU VMs the facts are
    in the metadata server, not in the environment.

    Args:
      heartbeat_timeout: seconds of silence after which a process counts as lost; also how long one waits for
        the others at the end.

    Raises:
      ConfigError: one of the variables is missing.
    """
    env = os.environ
    limit = heartbeat_timeout
    timeouts: dict[str, Any] = {"heartbeat_timeout_seconds": limit, "shutdown_timeout_seconds": limit}
    if "JAX_COORDINATOR_ADDRESS" in env:
        missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
        if missing:
            names = " and ".join(missing)
            raise ConfigError(Problem("", f"JAX_COORDINATOR_ADDRESS is set, so {names} must be set as well"))
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


def num_slices(devices: Sequence[Any]) -> int:
    """Number of slices (ICI domains) that the devices form."""
    return len({getattr(d, "slice_index", 0) for d in devices})


def build_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a resolved configuration.

    Args:
      config: resolved, so that the product of `mesh.ici` and `mesh.dcn` is the number of devices.
      devices: the devices to use; all by default.

    Returns:
      A mesh with the axes `MESH_AXES`, automatic partitioning on each. Each axis has its DCN part outside its ICI part.
    """
    devices = jax.devices() if devices is None else devices
    ici = [getattr(config.mesh.ici, axis) for axis in MESH_AXES]
    dcn = [getattr(config.mesh.dcn, axis) for axis in MESH_AXES]
    if num_slices(devices) > 1:
        grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "cpu":
        grid = np.asarray(devices).reshape([d * i for d, i in zip(dcn, ici, strict=True)])
    else:
        grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES)


def rows_of_this_process(mesh: Mesh, spec: PartitionSpec, num_rows: int) -> list[int]:
    """Indices of the batch rows that this process's devices hold, in order.

    Args:
      mesh: the device mesh.
      spec: PartitionSpec of a [rows, ...] array.
      num_rows: rows of the global batch.
    """
    # Of the rows alone: whether and how other dimensions are split makes no difference here.
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(*spec[:1]))
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map((num_rows,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(num_rows)))
    return sorted(rows)
