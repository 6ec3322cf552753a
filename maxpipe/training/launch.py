"""From a loaded configuration to a finished run: starts JAX, builds the run, reports, trains."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

import maxpipe
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import open_mirror
from maxpipe.checkpoint.policies import step_to_resume
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.printing import notes
from maxpipe.config.sections import Config
from maxpipe.config.terminal import emit
from maxpipe.data.loader import Loader, make_loader
from maxpipe.devices import processes
from maxpipe.devices.chips import chip_for, device_memory
from maxpipe.devices.mesh import build_mesh, num_slices
from maxpipe.devices.simulated import explain_threads
from maxpipe.devices.start import start_jax
from maxpipe.devices.xla_flags import advice
from maxpipe.planning.auto_stages import choose_stages
from maxpipe.planning.flops import model_flops_per_token
from maxpipe.supervision import Supervision
from maxpipe.supervision.failure import failing_fast
from maxpipe.telemetry.profiling import Profiler
from maxpipe.telemetry.recorder import Recorder
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.loop import DONE, Run, run_and_close, train
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.start_report import Decisions, report
from maxpipe.training.trainer import Trainer

# Packages whose versions every checkpoint records.
DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class BuildTrainer(Protocol):
    """`maxpipe.builder.build_trainer`, which is passed in: the builder imports this package."""

    def __call__(self, config: Config, mesh: Mesh, *, note: Callable[[str], None]) -> Trainer: ...


def launch(loaded: Loaded, supervision: Supervision, build_trainer: BuildTrainer) -> int:
    """Start JAX, fit the configuration to the devices, and train.

    Returns:
      The exit code, see `maxpipe.train`.

    Raises:
      ConfigError: the configuration does not fit the devices, the data or the run directory.
    """
    start_jax(loaded.config)
    with failing_fast():
        devices = jax.devices()
        config = resolve(loaded, len(devices), num_slices(devices))
        return run(config, loaded, build_mesh(config), supervision, build_trainer)


def run(
    config: Config,
    loaded: Loaded,
    mesh: Mesh,
    supervision: Supervision,
    build_trainer: BuildTrainer,
) -> int:
    """Train a resolved configuration on a mesh, and return the exit code."""
    decisions = Decisions(log)
    for line in (*advice(mesh.devices.flat[0].platform, os.environ), *explain_threads(config)):
        decisions.add(line)
    memory = device_memory(mesh.devices.reshape(-1).tolist())
    config = choose_stages(config, memory, decisions.add)
    directory, checkpointer = open_run_directory(config)
    newest_step = max(checkpointer.steps(), default=0)
    if newest_step >= config.steps and config.checkpoint.resume in ("auto", "must"):
        checkpointer.close()  # copies to the mirror what an earlier process could not
        finished = f"step {newest_step} is saved, and steps={config.steps}; nothing to do"
        log(f"{directory.root} is finished: {finished}")
        return DONE
    started = time.perf_counter()
    trainer = build_trainer(config, mesh, note=decisions.add)
    current = start_run(config, mesh, trainer, directory, checkpointer, supervision)
    reasons = decisions.take(notes(config, loaded))
    for line in report(config, mesh, str(directory.root), current.step, reasons):
        log(line)
    exit_code = run_and_close(current, lambda: train(current))
    log(_farewell(current, exit_code, str(directory.root), time.perf_counter() - started))
    return exit_code


def log(text: str) -> None:
    """Print a line, on process 0 only."""
    if jax.process_index() == 0:
        emit(text)


def open_run_directory(config: Config) -> tuple[RunDirectory, Checkpointer]:
    """Open the run's directory and its checkpoints, without writing to them.

    Raises:
      ConfigError: the directory belongs to another configuration, or its mirror cannot be read.
    """
    mirror = open_mirror(config)
    directory = RunDirectory(config, mirror)
    directory.claim(config, write=False)
    checkpointer = Checkpointer(directory.checkpoints, config.checkpoint, mirror=mirror, log=log)
    return directory, checkpointer


def start_run(
    config: Config,
    mesh: Mesh,
    trainer: Trainer,
    directory: RunDirectory,
    checkpointer: Checkpointer,
    supervision: Supervision,
) -> Run:
    """Initialise the state or restore it from a checkpoint, and return what the loop works with.

    Args:
      config: resolved.
      mesh: all devices.
      trainer: built for both.
      directory, checkpointer: from `open_run_directory`.
      supervision: of this process.

    Raises:
      ConfigError: data, run directory or mirror do not fit the configuration; nothing but
        `config.yml` has been written then.
    """
    place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
    place_eval = BatchPlacer(mesh, trainer.batch_spec, config.eval.global_batch_size)
    loader = make_loader(config, "train", place.rows)
    eval_loader = make_loader(config, "eval", place_eval.rows) if config.eval.every else None
    resume_step = step_to_resume(config.checkpoint.resume, checkpointer.steps(), checkpointer.place)
    claim_run_directory(config, directory)
    if resume_step is None:
        state, step = trainer.init(jax.random.key(config.seed)), 0
    else:
        exact_step = None if config.checkpoint.resume in ("auto", "must") else resume_step
        # The spike filter may be switched on or off, or have another window, in the next start.
        restored = checkpointer.restore(
            trainer.abstract_canonical(), exact_step, optional=("history",)
        )
        state, step = trainer.from_canonical(restored.state), restored.step
        loader = _continue_loader(loader, config, place, restored.iterator)
    recorder = build_recorder(config, mesh, directory, step)
    return Run(
        config=config,
        trainer=trainer,
        state=state,
        step=step,
        loader=loader,
        place=place,
        place_eval=place_eval,
        checkpointer=checkpointer,
        recorder=recorder,
        profiler=Profiler(
            config.telemetry.profile_steps,
            directory.root / "profile",
            is_required=config.telemetry.required,
            say=recorder.say,
        ),
        meta={"config": asdict(config), "versions": package_versions()},
        supervision=supervision,
        eval_loader=eval_loader,
    )


def claim_run_directory(config: Config, directory: RunDirectory) -> None:
    """Write `config.yml` into the run directory, and into the mirror on process 0.

    Raises:
      ConfigError: the directory belongs to another configuration, cannot be written to, or is not
        the same for all processes.
    """
    directory.claim(config)
    if not processes.share(directory.root):
        problem = f"not all processes see the same {directory.root}"
        remedy = "give a file system that they share, such as NFS"
        raise ConfigError(Problem("output_dir", f"{problem}: {remedy}"))
    if jax.process_index() == 0:
        directory.publish(config)


def build_recorder(config: Config, mesh: Mesh, directory: RunDirectory, step: int) -> Recorder:
    """Build the telemetry of a run that continues after `step`."""
    tokens = config.data.global_batch_size * config.data.sequence_length
    chip = chip_for(mesh.devices.flat[0].device_kind)
    return Recorder(
        config,
        directory.root,
        start_step=step,
        tokens_per_step=tokens,
        flops_per_step=tokens * model_flops_per_token(config.model, config.data.sequence_length),
        peak_flops=chip.peak_flops[config.model.dtype] * mesh.size if chip else None,
        is_main=jax.process_index() == 0,
    )


def package_versions() -> dict[str, str]:
    """Return the versions of maxpipe and of the packages that decide what a step computes."""
    # maxpipe's own version comes from the package: run from a checkout, it need not be installed.
    installed = {name: metadata.version(name) for name in DEPENDENCIES}
    return {"maxpipe": maxpipe.__version__} | installed


def _continue_loader(
    loader: Loader, config: Config, place: BatchPlacer, position: np.ndarray
) -> Loader:
    """Return a loader that continues at the data position of a checkpoint, one row per sequence."""
    loader.close()
    return make_loader(config, "train", place.rows, position[place.rows])


def _farewell(current: Run, exit_code: int, root: str, seconds: float) -> str:
    """Return the last line of a start: how far it came, and what the next start would do."""
    step, last_step = current.step, current.config.steps
    if exit_code:
        saved_step = max(current.checkpointer.steps(), default=None)
        if saved_step is None:
            saved = f"nothing is saved in {root}, so the next start begins with step 1"
        else:
            saved = f"step {saved_step} is saved in {root}, from which the next start continues"
        return f"stopped after step {step} of {last_step}, {saved}; exit code {exit_code}"
    if step < last_step:
        remedy = "the same command without it goes on"
        return f"stopped after step {step} of {last_step} (stop_after); {remedy}"
    curves = f"`tensorboard --logdir {root}` shows its curves"
    return f"done: {last_step} steps in {root}, {seconds:.0f} s for this start; {curves}"
