"""Go on with fewer hosts: fit the configuration to those present, and compile the step ahead.

Once a run trains, process 0 compiles the step for the next smaller number of hosts in a thread, so
that the run goes on at once if a host is lost. See `maxpipe.training.stored_step`.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import jax
from jax.sharding import Mesh

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.catalog import ENGINES
from maxpipe.config.elastic import KEY, Hosts, counts_to_go_on, fit_fewer
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.options import update
from maxpipe.config.terminal import Note, ignore_note
from maxpipe.devices import processes
from maxpipe.devices.chips import device_memory
from maxpipe.devices.cluster import Sizes, whole_of_process, whole_variable
from maxpipe.devices.mesh import build_mesh, num_slices
from maxpipe.devices.simulated import hindrance_of
from maxpipe.plan.auto_stages import choose_stages
from maxpipe.supervise.ending import left_behind
from maxpipe.supervise.process import ProgressFile
from maxpipe.training.loop import Session
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.stored_step import LOAD, origin, read, write
from maxpipe.training.trainer import BuildTrainer, Trainer

_STEPS = 3  # to dispatch before compiling: by then the first of them is finished
_LOOK_SECONDS = 0.2
# Otherwise the compiler would wait for measurements by processes that do not compile this.
OPTIONS = {"gpu": {"xla_gpu_shard_autotuning": False}}


def fit_hosts(loaded: Loaded, progress: ProgressFile) -> Loaded:
    """Return the configuration for the hosts present; unchanged if these are all.

    The supervisor learns from `progress` with how many hosts the run may go on. Raises ConfigError
    if it cannot with fewer, or not with these.
    """
    elastic = loaded.config.mesh.elastic
    if not elastic.axes:
        return loaded
    now, whole = _hosts()
    if not progress.is_read or whole.processes == 1:
        missing = "a supervisor (maxpipe supervise)" if not progress.is_read else "other hosts"
        remark = f"{KEY} has no effect without {missing}: the run needs all its devices"
        return replace(loaded, remarks=(*loaded.remarks, remark))
    if jax.devices()[0].platform == "tpu":
        message = "a slice of TPUs does not start without one of its hosts: leave the key out"
        raise ConfigError(Problem(KEY, message))
    counts = tuple(counts_to_go_on(loaded, whole))
    progress.tell(sizes=Sizes(counts, elastic.wait_seconds, whole_variable(whole)))
    return loaded if now == whole else fit_fewer(loaded, whole, now)


def fit_next(loaded: Loaded) -> tuple[Loaded, Hosts] | None:
    """Return the configuration and the hosts after the loss of one more; None if all are needed."""
    now, whole = _hosts()
    counts = [count for count in counts_to_go_on(loaded, whole) if count < now.processes]
    hosts = whole.fewer(counts[-1]) if counts else None
    return (fit_fewer(loaded, whole, hosts), hosts) if hosts else None


def _hosts() -> tuple[Hosts, Hosts]:
    """Return the hosts present, and all hosts of the run."""
    devices = jax.devices()
    now = Hosts(jax.process_count(), len(devices), num_slices(devices))
    return now, whole_of_process() or now


def step_file(config: Config, count: int) -> Path:
    return RunDirectory(config).root / "compiled_ahead" / f"step-{count}"


def compile_ahead(
    given: Loaded, run: Session, build_trainer: BuildTrainer, log: Callable[[str], None]
) -> None:
    """Let process 0 compile the step for fewer hosts than `given` has, once `run` trains."""
    is_elastic = given.config.mesh.elastic.axes and run.supervision.progress.is_read
    if not is_elastic or processes.index() > 0:
        return
    first = run.step

    def work() -> None:
        while run.step < first + _STEPS:
            time.sleep(_LOOK_SECONDS)
        try:
            if fitted := fit_next(given):
                began, those = time.perf_counter(), f"{fitted[1].processes} of {processes.count()}"
                file = store_step(*fitted, build_trainer)
                took = f"compiled ahead in {time.perf_counter() - began:.1f} s"
                log(f"the step for {those} processes was {took}, for the loss of a host: {file}")
        # Whatever the error is, training goes on without the step.
        except Exception as error:
            log(f"no step for fewer hosts is compiled ahead, only when it is needed: {error}")

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    left_behind.append(thread)
    thread.start()


def store_step(given: Loaded, hosts: Hosts, build_trainer: BuildTrainer) -> Path:
    """Compile the step for the first hosts, fitted to them, and return its file; makes no array.

    Raises ConfigError if no stored step could run there, and OutOfMemory if it does not fit.
    """
    from maxpipe.compile.step import StepTrainer, compile_step  # which no other run needs

    if reason := hindrance_of(hosts.devices, hosts.processes):
        raise ConfigError(Problem("", reason))
    devices = [d for d in jax.devices() if d.process_index < hosts.processes]
    config = resolve(given, hosts.devices, hosts.slices)
    if not ENGINES[config.pipeline.engine].one_program:
        reason = f"the {config.pipeline.engine} engine has a program for each stage"
        raise ConfigError(Problem("pipeline.engine", reason))
    # Decisions are noted by the attempt that needs the step.
    config = choose_stages(config, device_memory(devices), ignore_note)
    mesh, file = build_mesh(config, devices), step_file(config, hosts.processes)
    with suppress(ConfigError):
        if read(str(file))[0].origin == origin(config, mesh):  # of an earlier start
            return file
    trainer = cast(StepTrainer, build_trainer(config, mesh, note=ignore_note))
    compiled = compile_step(config, mesh, trainer, ignore_note, OPTIONS.get(devices[0].platform))
    file.parent.mkdir(parents=True, exist_ok=True)
    write(str(file), compiled.executable, config, mesh)
    return file


def build_with_step_ahead(
    config: Config, mesh: Mesh, build_trainer: BuildTrainer, note: Note
) -> Trainer | None:
    """Build the trainer of an attempt with fewer hosts, with the step that was compiled ahead.

    All processes call this. A file is used once: if this attempt fails, the next one compiles its
    own step. Returns None if there is no such step, or if it cannot be loaded.
    """
    if whole_of_process() is None:
        return None
    file = step_file(config, processes.count())
    if not processes.agree(file.is_file()):
        return None
    used = file.with_name(f"{file.name}.used")
    if processes.index() == 0:
        file.replace(used)  # loading it may already end the process
    processes.agree(True)
    decisions: list[str] = []
    trainer, reason = None, "another process cannot load it"
    try:
        trainer = build_trainer(update(config, {LOAD: str(used)}), mesh, note=decisions.append)
    except ConfigError as error:
        reason = str(error)
    if not processes.agree(trainer is not None):
        note(f"the step compiled ahead is not used: {reason}")
        return None
    for decision in (*decisions, f"{LOAD}={file}: compiled while there were more hosts ({KEY})"):
        note(decision)
    return trainer
