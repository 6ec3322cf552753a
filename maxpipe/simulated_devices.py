"""Threads for simulated devices, so that no collective waits for a thread that other collectives hold.

A collective on a CPU blocks a thread until the other devices have come. XLA starts those of a program in the same
order on all devices, except where one stands beside a loop that has others inside, as those that fetch weights of
layers outside the pipeline do; an executable from a file has lost that order altogether. Devices then wait in different
collectives: n that are ready at once block up to n * (devices - 1) threads, and if none is left XLA ends the process
after 40 seconds. By itself it has one for each device. NPROC is the variable that XLA reads.
"""

import os

import jax

from maxpipe.config.sections import Config

THREADS_PER_DEVICE = 16
UNSAFE = "programs from files can hang on CPU devices of several processes, or with few threads (NPROC)"


def start_threads(config: Config, devices: int) -> None:
    """Before JAX makes the devices: gives XLA more threads where collectives may be out of order, and only there."""
    if devices > 1 and (_wants_stored_programs(config) or config.pipeline.parallel_layers > 0):
        os.environ.setdefault("NPROC", str(max(THREADS_PER_DEVICE * devices, os.cpu_count() or 1)))


def runs_stored_programs() -> bool:
    """Whether executables from files are safe to run on all devices.

    Several processes on CPUs rely on an order of collectives that those have lost, whatever the threads.
    """
    if jax.default_backend() != "cpu" or jax.device_count() == 1:
        return True
    threads = int(os.environ.get("NPROC", "0"))
    return jax.process_count() == 1 and threads >= THREADS_PER_DEVICE * jax.device_count()


def explain_threads(config: Config) -> list[str]:
    """What to say of programs from files that a configuration asks for."""
    if jax.default_backend() != "cpu" or jax.device_count() == 1 or not _wants_stored_programs(config):
        return []
    if runs_stored_programs():
        return [f"{os.environ['NPROC']} threads, since programs from files need them: steps may take 30 % longer"]
    return [f"compile.cache_dir=off: {UNSAFE}"]


def _wants_stored_programs(config: Config) -> bool:
    return bool(config.compile.load) or config.compile.cache_dir not in ("", "off")
