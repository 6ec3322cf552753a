"""Compile a train step from shapes alone."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.compile.report import CompilerMemory, CompileTimes
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.imports import install_command
from maxpipe.config.terminal import Note

PROGRESS_SECONDS = 15.0
LONGEST_SILENCE = 240.0
UNREADABLE = "this JAX cannot read the compiler's result"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class StepTrainer(Protocol):
    """The compiled part of a trainer whose step is one program, `training.trainer.SpmdTrainer`."""

    batch_spec: PartitionSpec
    jitted_step: jax.stages.Wrapped

    def abstract_state(self) -> object: ...


class OutOfMemory(Exception):
    """The compiler gave up: a program, maybe one of several, needs more bytes than a device has."""

    def __init__(self, needed: float, available: float, program: str = ""):
        super().__init__(f"needs {needed:.0f} of {available:.0f} bytes")
        self.needed, self.available, self.program = needed, available, program


@dataclass(frozen=True)
class CompiledStep:
    """A step that has been compiled and not run; the jaxpr is the step before partitioning."""

    jaxpr: ClosedJaxpr
    executable: jax.stages.Compiled
    times: CompileTimes


def text_of(executable: jax.stages.Compiled) -> str:
    """Return the optimized HLO of a program."""
    try:
        return executable.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:120]
        message = f"{UNREADABLE} ({reason})"
        remedy = f"install the libtpu that it was made for: {install_command('tpu')}"
        raise ConfigError(Problem("compile.topology", f"{message}; {remedy}")) from None


def compile_step(
    config: Config,
    mesh: Mesh,
    trainer: StepTrainer,
    note: Note,
    options: Mapping[str, bool] | None = None,
) -> CompiledStep:
    """Compile `trainer.jitted_step`; no array is made.

    Raises:
      OutOfMemory: the compiler says that the program does not fit.
    """
    sharding = NamedSharding(mesh, trainer.batch_spec)
    shape = (config.data.global_batch_size, config.data.sequence_length)
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), jnp.int32)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in (dtypes | {"weights": jnp.float32}).items()
    }
    note(f"{'tracing':<12}the train step")
    moments = [time.perf_counter()]
    traced = trainer.jitted_step.trace(trainer.abstract_state(), batch)
    moments.append(time.perf_counter())
    try:
        lowered = traced.lower()
        moments.append(time.perf_counter())
        note(f"{'compiling':<12}the program, minutes for a large model")
        with progress("compiling", note):
            executable = lowered.compile({**options} if options else None)
        moments.append(time.perf_counter())
    except jax.errors.JaxRuntimeError as error:
        raise (out_of_memory(str(error)) or error) from None
    times = CompileTimes(*(end - begin for begin, end in pairwise(moments)))
    return CompiledStep(traced.jaxpr, executable, times)


@contextmanager
def progress(phase: str, note: Note, first_seconds: float = PROGRESS_SECONDS) -> Iterator[None]:
    """Note the seconds that a phase has lasted so far, ever less often.

    The first silence has `first_seconds`; each is twice as long as the last, up to a limit.
    """
    done = threading.Event()
    began = time.perf_counter()

    def report() -> None:
        silence = first_seconds
        while not done.wait(silence):
            note(f"{phase:<12}for {time.perf_counter() - began:.0f} s")
            silence = min(2 * silence, LONGEST_SILENCE)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def memory_of(compiled: jax.stages.Compiled, mesh: Mesh) -> CompilerMemory:
    """Return the memory that a program compiled for a mesh takes on one device.

    On TPUs temp is what lives next to arguments and results at the fullest moment: libtpu compares
    the sum with the memory of the chip. Its own figure for temp is larger where there are loops;
    libtpu 0.0.42.1 compiles a program with 19.5 GiB of it for a chip of 15.75 GiB.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temp = memory.temp_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu" and memory.peak_memory_in_bytes:
        temp = min(temp, memory.peak_memory_in_bytes - arguments - results)
    return CompilerMemory(arguments, temp, memory.generated_code_size_in_bytes, results)


def out_of_memory(message: str, program: str = "") -> OutOfMemory | None:
    """Read the sizes out of a compiler's message; None if it is about something else.

    Messages are "Used 120.5G of 95.7G hbm" and "memory required ... (74.8G) exceeds available HBM
    (15.7G)".
    """
    amount = r"([\d.]+)([KMGT])"
    for pattern in (
        rf"Used {amount} of {amount} hbm",
        rf"\({amount}\) exceeds available HBM \({amount}\)",
    ):
        if match := re.search(pattern, message):
            needed, available = (float(match[i]) * UNITS[match[i + 1]] for i in (1, 3))
            return OutOfMemory(needed, available, program)
    return None
