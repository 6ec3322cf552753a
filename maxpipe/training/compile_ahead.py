"""Compile the step for fewer hosts ahead of time, so that a run goes on at once if one is lost.

Process 0 does so in a thread, for its own devices and those of the other remaining processes, which
need not take part. `maxpipe.training.step_ahead` runs the result.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jax

from maxpipe.compile.step import StepTrainer, compile_step
from maxpipe.config import ConfigError, Problem
from maxpipe.config.catalog import ENGINES
from maxpipe.config.elastic import Hosts
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.terminal import ignore_note
from maxpipe.devices import processes
from maxpipe.devices.chips import device_memory
from maxpipe.devices.mesh import build_mesh
from maxpipe.devices.simulated import hindrance_of
from maxpipe.plan.auto_stages import choose_stages
from maxpipe.supervision.ending import leave_behind
from maxpipe.training.elastic import fit_next
from maxpipe.training.loop import Session
from maxpipe.training.step_ahead import BuildTrainer, confirm, step_file
from maxpipe.training.stored_step import holds, write

_STEPS = 3  # to dispatch before compiling: by then the first of them is finished
_LOOK_SECONDS = 0.2
# Otherwise the compiler would wait for measurements by processes that do not compile this.
OPTIONS = {"gpu": {"xla_gpu_shard_autotuning": False}}


def compile_ahead(
    given: Loaded, run: Session, build_trainer: BuildTrainer, log: Callable[[str], None]
) -> None:
    """Let process 0 compile the step for fewer hosts in a thread, once `run` has begun to train.

    Args:
      given: the configuration for all hosts.
      run: the run, before its first step.
      build_trainer: function that builds the trainer whose step is compiled.
      log: function that prints a line.
    """
    is_elastic = given.config.mesh.elastic.axes and run.supervision.progress.is_read
    if is_elastic and processes.index() == 0:
        arguments = (given, run, build_trainer, log)
        thread = threading.Thread(target=_work, args=arguments, name="ahead", daemon=True)
        leave_behind(thread)
        thread.start()


def _work(
    given: Loaded, run: Session, build_trainer: BuildTrainer, log: Callable[[str], None]
) -> None:
    first = run.step
    while run.step < first + _STEPS:
        time.sleep(_LOOK_SECONDS)
    count, those = processes.count(), "the step for fewer hosts"
    try:
        confirm(run.config, count)
        if (fitted := fit_next(given)) is None:
            return
        smaller, hosts = fitted
        those = f"the step for {hosts.processes} of {count} processes"
        began = time.perf_counter()
        if file := store_step(smaller, hosts, build_trainer):
            seconds = time.perf_counter() - began
            log(f"{those} was compiled ahead in {seconds:.1f} s, for the loss of a host: {file}")
    # Whatever the error is, training goes on without the step.
    except Exception as error:
        log(f"{those} is not compiled ahead, only when it is needed: {error}")


def store_step(given: Loaded, hosts: Hosts, build_trainer: BuildTrainer) -> Path | None:
    """Compile the step for the first processes and store it; no array is allocated.

    Args:
      given: the configuration fitted to these hosts.
      hosts: the hosts that would be left.
      build_trainer: function that builds the trainer.

    Returns:
      The file; None if it already holds the step.

    Raises:
      ConfigError: no stored step could run there, or the file cannot be written.
      OutOfMemory: the program does not fit.
    """
    if reason := hindrance_of(hosts.devices, hosts.processes):
        raise ConfigError(Problem("", reason))
    devices = [d for d in jax.devices() if d.process_index < hosts.processes]
    config = resolve(given, hosts.devices, hosts.slices)
    if not ENGINES[config.pipeline.engine].one_program:
        reason = f"the {config.pipeline.engine} engine has a program for each stage"
        raise ConfigError(Problem("pipeline.engine", reason))
    # Decisions are noted by the attempt that needs the step.
    config = choose_stages(config, device_memory(devices), ignore_note)
    mesh = build_mesh(config, devices)
    file = step_file(config, hosts.processes)
    if holds(str(file), config, mesh):
        return None
    trainer = cast(StepTrainer, build_trainer(config, mesh, note=ignore_note))
    compiled = compile_step(config, mesh, trainer, ignore_note, OPTIONS.get(devices[0].platform))
    file.parent.mkdir(parents=True, exist_ok=True)
    write(str(file), compiled.executable, config, mesh)
    return file
