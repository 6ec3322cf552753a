"""Start JAX: simulated devices, several processes, the persistent compilation cache."""

import os
import threading
from functools import partial
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import derive_known
from maxpipe.config.rules.engines import check_processes
from maxpipe.config.sections import Config
from maxpipe.devices import processes
from maxpipe.devices.cluster import (
    announced_processes,
    coordinator_variables,
    is_cluster,
    whole_of_process,
)
from maxpipe.devices.simulated import check_simulated, has_started, start_threads, uses_cache
from maxpipe.devices.transfers import start_transfers

# What libtpu asks for on a machine without a TPU; the values do not matter.
NO_MACHINE = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}
_QUIET_SECONDS = 10.0  # of waiting for other processes before the console says so


def start_jax(config: Config) -> None:
    """Configure JAX before its first use: simulated devices, processes, the compilation cache.

    A program may call it for one run after another, as long as the devices stay the same.

    Raises:
      ConfigError: the environment's description of the processes is incomplete, they cannot share
        the simulated devices evenly, or do not fit the stages, or JAX has started with other
        devices than those to simulate.
    """
    # Checked first: after `start_processes` the message would come only when all peers are there.
    check_processes(derive_known(config), _processes_of_whole_run())
    if config.mesh.simulated_devices:
        devices = simulated_share(config.mesh.simulated_devices)
        if has_started():
            check_simulated(devices)
        else:
            jax.config.update("jax_num_cpu_devices", devices)
    if not has_started():
        start_threads(
            config, max(1, jax.config.values["jax_num_cpu_devices"]), announced_processes()
        )
    name_machine()
    start_processes(config.mesh.heartbeat_timeout_seconds)
    engine = ENGINES.get(derive_known(config).pipeline.engine)
    if processes.count() > 1 and engine and not engine.one_program and not has_started():
        start_transfers()
    check_platforms()
    start_compile_cache(config)


def check_platforms() -> None:
    """Start the devices of a run with one process; ConfigError if JAX_PLATFORMS is wrong."""
    if processes.count() > 1:
        return  # an error may also come from a lost process
    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        if not platforms:
            raise
        reason = str(error).partition("\n")[0] or "it is not installed"
        message = (
            f"JAX cannot use {platforms!r} here: {reason}; install the extra for this machine, "
            'such as pip install -e ".[cuda]", or unset the variable'
        )
        raise ConfigError(Problem("JAX_PLATFORMS", message)) from None


def name_machine() -> None:
    """Name a machine for libtpu where JAX has found no TPU; GPUs are looked for as before.

    JAX starts libtpu wherever it is installed, and without a name it complains at length.
    """
    from jax._src import cloud_tpu_init  # there is no public name for it

    if not getattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True):
        for name, value in NO_MACHINE.items():
            os.environ.setdefault(name, value)


def simulated_share(devices: int) -> int:
    """Return how many of the simulated devices of all hosts belong to this process; raises
    ConfigError if they do not divide over the processes.
    """
    count = _processes_of_whole_run()
    if devices % count:
        message = f"{devices} do not divide over {count} processes; take a multiple of {count}"
        raise ConfigError(Problem("mesh.simulated_devices", message))
    return devices // count


def _processes_of_whole_run() -> int:
    """Return the number of processes that the configuration is written for."""
    whole = whole_of_process()
    return whole.processes if whole else announced_processes()


def start_processes(heartbeat_timeout: int) -> None:
    """Call `jax.distributed.initialize` if the environment names several processes.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID take precedence. JAX itself
    recognises TPU pods, and Slurm and MPI jobs of more than one task. With MAXPIPE_DISTRIBUTED=1 it
    looks further: on TPU VMs the facts are in the metadata server, not in the environment.

    `heartbeat_timeout` is for how many seconds a process may be silent, and how long it waits for
    the others at the end. The console says so if they do not meet within seconds. Raises
    ConfigError if one of the variables is missing.
    """
    if jax.distributed.is_initialized():
        return  # by an earlier run of this program
    place = coordinator_variables()
    if place is None and not is_cluster():
        return
    meeting = "the other processes of the job"
    if place:
        meeting = f"all {place[1]} processes to meet at {place[0]} (JAX_COORDINATOR_ADDRESS)"
    text = f"waiting for {meeting}: start those that are missing, and let hosts reach the port"
    waiting = threading.Timer(_QUIET_SECONDS, print, [text], {"flush": True})
    waiting.daemon = True
    waiting.start()
    initialize = partial(
        jax.distributed.initialize,
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=heartbeat_timeout,
    )
    try:
        initialize(*(place or ()))
    finally:
        waiting.cancel()


def start_compile_cache(config: Config) -> None:
    """Use the persistent compilation cache, unless it is off or stored programs cannot run here."""
    cache = compile_cache(config) if uses_cache(config) else None
    if cache is not None and not _is_writable(cache):
        print(f"nothing is cached: {cache} cannot be written (compile.cache_dir)", flush=True)
        cache = None
    # With None JAX stores and finds no programs.
    jax.config.update("jax_compilation_cache_dir", None if cache is None else str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    reset_cache()  # JAX would keep to the directory of an earlier run of this program


def compile_cache(config: Config) -> Path | None:
    """Return the directory of the persistent compilation cache, or None if it is off."""
    if config.compile.cache_dir == "off":
        return None
    return Path(config.compile.cache_dir or Path(config.output_dir) / "compile_cache").absolute()


def _is_writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, which may not exist yet."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
