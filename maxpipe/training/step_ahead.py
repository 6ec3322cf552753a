"""Start an attempt on fewer hosts with a step that was compiled while there were more.

`maxpipe.training.compile_ahead` leaves it in the run's directory, next to the checkpoints. It is
machine code, run only if it agrees with the configuration as `maxpipe.training.stored_step` says;
otherwise the attempt compiles its own.
"""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from maxpipe.config import Config, ConfigError
from maxpipe.config.elastic import KEY
from maxpipe.config.options import update
from maxpipe.config.terminal import Note
from maxpipe.devices import processes
from maxpipe.devices.cluster import whole_of_process
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.stored_step import LOAD
from maxpipe.training.trainer import Trainer

BuildTrainer = Callable[..., Trainer]  # (config, mesh, note=...), `maxpipe.builder.build_trainer`

_TRIED = ".tried"  # suffix of a file in use by an attempt that has not finished a step yet


def step_file(config: Config, count: int) -> Path:
    """Return the path of the step for `count` processes."""
    return RunDirectory(config).root / "compiled_ahead" / f"step-{count}"


def build_with_step_ahead(
    config: Config, mesh: Mesh, build_trainer: BuildTrainer, note: Note
) -> Trainer | None:
    """Build the trainer of an attempt with fewer hosts, with the step that was compiled ahead.

    All processes call this. The file has another name until `confirm` is called, so that the next
    attempt compiles its own step if this one fails.

    Args:
      config: the resolved configuration.
      mesh: the mesh of all devices.
      build_trainer: function that builds the trainer.
      note: called with each automatic decision.

    Returns:
      The trainer; None if there is no such step, or it cannot be loaded.
    """
    if whole_of_process() is None:
        return None
    file = step_file(config, processes.count())
    tried = _tried(file)
    if processes.index() == 0:
        tried.unlink(missing_ok=True)  # an attempt has failed with it
    if not processes.agree(file.is_file()):
        return None
    if processes.index() == 0:
        file.rename(tried)  # loading it may already end the process
    processes.agree(True)
    decisions: list[str] = []
    trainer, reason = None, "another process cannot load it"
    try:
        loading = update(config, {LOAD: str(tried)})
        trainer = build_trainer(loading, mesh, note=decisions.append)
    except ConfigError as error:
        reason = str(error)
    if not processes.agree(trainer is not None):
        note(f"the step compiled ahead is not used: {reason}")
        return None
    for decision in (*decisions, f"{LOAD}={file}: compiled while there were more hosts ({KEY})"):
        note(decision)
    return trainer


def confirm(config: Config, count: int) -> None:
    """Give the file of the step in use its name back, once these processes have finished a step.

    Raises:
      OSError: the run's directory cannot be written.
    """
    file = step_file(config, count)
    if _tried(file).is_file():
        _tried(file).rename(file)


def _tried(file: Path) -> Path:
    return file.with_name(file.name + _TRIED)
