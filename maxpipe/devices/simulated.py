"""Give simulated devices enough threads that no work waits for a thread which waits for that work.

XLA runs the programs of all simulated devices of a process on one pool of threads, by default as
many as devices or cores, whichever is more. Two kinds of work hold a thread while they wait.

A launch waits on a thread for each of its devices once 32 programs are in flight there. A program
runs on a thread for each of its devices, which wait for each other, and in other processes, in
collectives. What they wait for comes with transfers from other processes, which need a thread of
the same pool to store it. XLA runs one program of several devices at a time, and one of a single
device on each of them: with a thread more than `HELD_PER_DEVICE` for each device one is free.

XLA starts the collectives of a program in the same order on all devices, with two exceptions: a
collective next to a loop that has others inside, such as a gather of weights of layers outside the
pipeline, and an executable from a file, which has lost that order altogether. Devices then wait in
different collectives. If n are ready at once they block up to n * (devices - 1) threads, and if no
thread is left XLA ends the process after 40 seconds. How many are ready at once is not known before
compiling. Measured with sequential FSDP on 8 devices: with 8 threads two of three starts from a
cache hung; with `THREADS_PER_DEVICE` none of 45 did, 20 of them sequential, the others circular and
scheduled. Threads cost time: those of 8 devices raised CPU time per step by up to 30 % on two
cores.
"""

import os

import jax

from maxpipe.config import Config, replace
from maxpipe.config.errors import ConfigError, Problem

HELD_PER_DEVICE = 3  # by a launch, a program of several devices, and one of this device alone
THREADS_PER_DEVICE = 16  # where collectives may be out of order
MOST_THREADS = 256  # XLA makes no larger pool


def has_started() -> bool:
    """Return whether JAX has made its devices, which then cannot change in this process."""
    from jax._src import xla_bridge  # there is no public name for it

    return xla_bridge.backends_are_initialized()


def check_simulated(devices: int) -> None:
    """Check that JAX, which has started, simulates so many devices; accelerators stay as they are;
    raises ConfigError if it has other CPU devices.
    """
    started = jax.local_device_count()
    if jax.default_backend() == "cpu" and started != devices:
        message = (
            f"JAX has started in this process with {started} CPU device{'s' * (started > 1)}, and "
            f"cannot change to {devices}: restart Python (a notebook's kernel) and begin the run "
            f"before anything else uses JAX, or take mesh.simulated_devices={started} with a mesh "
            "that fits"
        )
        raise ConfigError(Problem("mesh.simulated_devices", message))


def start_threads(config: Config, devices: int, processes: int) -> None:
    """Set NPROC, which XLA reads, where it needs more threads; before JAX makes devices.

    Args:
      config: the configuration.
      devices: number of CPU devices that this process has.
      processes: number of processes of the run.
    """
    if (needed := _needed(config, devices, processes)) > _cores():
        os.environ.setdefault("NPROC", str(needed))


def hindrance() -> str:
    """Return why executables from files cannot run here, and the remedy; empty if they can."""
    return hindrance_of(jax.device_count(), jax.process_count())


def hindrance_of(devices: int, processes: int) -> str:
    """Return the `hindrance` of a run with these numbers of devices and processes."""
    if jax.default_backend() != "cpu" or devices == 1:
        return ""
    if processes > 1:
        return (
            "several processes on CPUs rely on an order of collectives that programs from files "
            "have lost"
        )
    needed = THREADS_PER_DEVICE * devices
    if needed > MOST_THREADS:
        most_devices = MOST_THREADS // THREADS_PER_DEVICE
        return f"programs from files run on at most {most_devices} CPU devices, not on {devices}"
    if _threads() < needed:
        return (
            f"programs from files need NPROC={needed} threads on {devices} CPU devices, not "
            f"{_threads()}"
        )
    return ""


def uses_cache(config: Config) -> bool:
    """Return whether to use the compilation cache; several CPU devices need a named directory."""
    return not _are_several_cpus() or (config.compile.cache_dir != "" and not hindrance())


def explain_threads(config: Config) -> list[str]:
    """Return lines on what was decided about the cache and about threads, with reasons."""
    if not _are_several_cpus():
        return []
    cache_dir = config.compile.cache_dir
    lines = []
    if cache_dir == "":
        lines.append(
            "compile.cache_dir=off: several CPU devices; name a directory to keep what is compiled"
        )
    elif cache_dir != "off" and (reason := hindrance()):
        lines.append(f"compile.cache_dir=off: {reason}")
        config = replace(config, **{"compile.cache_dir": "off"})
    needed = _needed(config, jax.local_device_count(), jax.process_count())
    if _threads() < needed:
        lines.append(
            f"NPROC={_threads()} threads are too few, and the run may hang: unset it, or set it to "
            f"{needed}"
        )
    return lines


def _needed(config: Config, devices: int, processes: int) -> int:
    """Return the least threads with which no work waits for ever; 0 if any number will do.

    Args:
      config, devices, processes: as for `start_threads`.
    """
    loads_programs = bool(config.compile.load) or config.compile.cache_dir not in ("", "off")
    can_load = processes == 1 and THREADS_PER_DEVICE * devices <= MOST_THREADS
    has_layers_outside = 0 < config.pipeline.parallel_layers < config.model.stacked_layers
    if devices > 1 and (has_layers_outside or (loads_programs and can_load)):
        return min(THREADS_PER_DEVICE * devices, MOST_THREADS)
    return min(HELD_PER_DEVICE * devices + 1, MOST_THREADS) if processes > 1 else 0


def _are_several_cpus() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _threads() -> int:
    """Return the size of XLA's thread pool, from the variables that XLA reads."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (value := os.environ.get(name, "")).isdecimal() and int(value) > 0:
            return min(int(value), MOST_THREADS)
    return _cores()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
