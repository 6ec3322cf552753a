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

from maxpipe.config.sections import MESH_AXES, Config

# Variables by which JAX's own cluster detection finds a TPU pod, a multi-slice job, or an MPI launch.
CLUSTER_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")


def start_jax(config: Config) -> None:
    """Configures JAX before its first use: simulated devices, several processes, the compilation cache."""
    if config.mesh.simulated_devices:
        jax.config.update("jax_num_cpu_devices", config.mesh.simulated_devices)
    start_processes()
    cache = compile_cache(config)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_cache(config: Config) -> Path | None:
    """Directory of the persistent compilation cache, or None if it is off."""
    if config.compile.cache_dir == "off":
        return None
    return Path(config.compile.cache_dir or Path(config.output_dir) / "compile_cache").absolute()


def start_processes() -> None:
    """`jax.distributed.initialize` if the environment says that this process is one of several.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID decide; TPU pods, Slurm and MPI jobs of more
    than one task are recognised by JAX itself.
    """
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" in env:
        missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
        if missing:
            raise ValueError(f"JAX_COORDINATOR_ADDRESS is set, so {' and '.join(missing)} must be set as well")
        jax.distributed.initialize(
            env["JAX_COORDINATOR_ADDRESS"], int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
        )
        return
    pod = len(env.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
    slurm = int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env
    if pod or slurm or any(name in env for name in CLUSTER_VARIABLES):
        jax.distributed.initialize()


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
