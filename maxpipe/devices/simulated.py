"""Threads for simulated devices, so that no collective waits for a thread that other collectives hold.

A collective on a CPU blocks a thread until the other devices have come. XLA starts those of a
program in the same order on all devices, except where one stands beside a loop that has others
inside, as those that fetch weights of layers outside the pipeline do; an executable from a file has
lost that order altogether. Devices then wait in different collectives: n that are ready at once
block up to n * (devices - 1) threads, and if none is left XLA ends the process after 40 seconds. By
itself XLA has as many threads as devices or cores, whichever are more.

How many collectives are ready at once is not known before compiling. Of sequential FSDP on 8
devices, two of three starts from a cache hung with 8 threads; with `THREADS_PER_DEVICE` none of 45
did, 20 of them sequential, the others circular and scheduled. Threads cost time: those of 8 devices
raised CPU time per step by up to 30 % on two cores.
"""

import os

import jax

from maxpipe.config.sections import Config

THREADS_PER_DEVICE = 16
MOST_THREADS = 256  # XLA makes no larger pool


def start_threads(config: Config, devices: int, processes: int) -> None:
    """Before JAX makes the devices: sets NPROC, which XLA reads, where collectives may be out of order.

    Args:
      config: of the run.
      devices: those that this process simulates.
      processes: of the run.
    """
    if devices > 1 and _needs_threads(config, devices, processes):
        threads = max(min(THREADS_PER_DEVICE * devices, MOST_THREADS), os.cpu_count() or 1)
        os.environ.setdefault("NPROC", str(threads))


def hindrance() -> str:
    """Why executables from files may not run on these devices, and what would let them; empty if they may."""
    devices = jax.device_count()
    if not _are_several_cpus():
        return ""
    if jax.process_count() > 1:
        return "several processes on CPUs rely on an order of collectives that programs from files have lost"
    needed = THREADS_PER_DEVICE * devices
    if needed > MOST_THREADS:
        return f"programs from files run on at most {MOST_THREADS // THREADS_PER_DEVICE} CPU devices, not on {devices}"
    if _threads() < needed:
        return f"programs from files need NPROC={needed} threads on {devices} CPU devices, not {_threads()}"
    return ""


def uses_cache(config: Config) -> bool:
    """Whether there is to be a compilation cache, if it is not off: several CPU devices have to be asked for it."""
    return not _are_several_cpus() or (config.compile.cache_dir != "" and not hindrance())


def explain_threads(config: Config) -> list[str]:
    """What to say of the cache and of threads."""
    if not _are_several_cpus():
        return []
    cache, said = config.compile.cache_dir, []
    if cache == "":
        said.append(
            "compile.cache_dir=off: several CPU devices; name a directory to keep what is compiled"
        )
    elif cache != "off" and (reason := hindrance()):
        said.append(f"compile.cache_dir=off: {reason}")
    devices = jax.device_count()
    if (
        _needs_threads(config, devices, jax.process_count())
        and _threads() >= THREADS_PER_DEVICE * devices
    ):
        said.append(
            f"{_threads()} threads, so that collectives out of order do not block all: steps take longer"
        )
    return said


def _needs_threads(config: Config, devices: int, processes: int) -> bool:
    wants_files = bool(config.compile.load) or config.compile.cache_dir not in ("", "off")
    could_run_them = processes == 1 and THREADS_PER_DEVICE * devices <= MOST_THREADS
    return config.pipeline.parallel_layers > 0 or (wants_files and could_run_them)


def _are_several_cpus() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def _threads() -> int:
    """Of XLA's pool, by the variables that it reads."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (value := os.environ.get(name, "")).isdecimal() and int(value) > 0:
            return min(int(value), MOST_THREADS)
    return os.cpu_count() or 1
