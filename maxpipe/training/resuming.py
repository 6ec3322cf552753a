"""Continue a run from one of its steps: choose it, restore it, and put its state in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, datetime

import numpy as np

from maxpipe.checkpoint.going_back import Job, step_since
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import AUTO, NEWEST, RESUME, step_to_resume
from maxpipe.checkpoint.reader import Restored
from maxpipe.config.identity import Change
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.data.chat_template import trained_template
from maxpipe.data.loader import Loader, make_loader, moved_state
from maxpipe.devices import processes
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.continuity import (
    DOCUMENTS,
    FINGERPRINT,
    has_other_optimizer,
    optional_parts,
)
from maxpipe.training.run_directory import Meta, RunDirectory
from maxpipe.training.state import TrainState
from maxpipe.training.trainer import StateT, Trainer


def followed_once(
    config: Config, checkpointer: Checkpointer, job: Job, log: Callable[[str], None]
) -> Config:
    """Return the configuration; it resumes from the newest step if an earlier attempt has already
    gone back: see `maxpipe.checkpoint.going_back`. All processes call this.
    """
    resume = config.checkpoint.resume
    if resume in NEWEST:
        return config
    step = step_since(resume, job, checkpointer.resumable(), checkpointer.record)
    step = processes.of_first_process(-1 if step is None else step)
    if step < 0:
        return config
    log(
        f"{RESUME}={resume} was followed by an earlier attempt of this job, which has reached step "
        f"{step}: this one continues from the newest step"
    )
    return replace(config, checkpoint=replace(config.checkpoint, resume=AUTO))


def dated(config: Config, directory: RunDirectory, note: Note) -> Config:
    """Return the configuration with the date that its chat template writes: that of the run's
    earlier starts, or today. All processes call this.
    """
    template = None if config.data.chat_date else trained_template(config.data)
    if template is None or not template.writes_date:
        return config
    text = directory.chat_date()
    day = datetime.fromisoformat(text) if text else datetime.now()
    first = date.fromordinal(processes.of_first_process(day.toordinal())).isoformat()
    note(f"data.chat_date={first}: the day on which the run began")
    return replace(config, data=replace(config.data, chat_date=first))


def step_to_continue(config: Config, checkpointer: Checkpointer) -> int | None:
    """Return `step_to_resume`; replicas in memory count unless the configuration names a step."""
    resume = config.checkpoint.resume
    steps = checkpointer.resumable() if resume in NEWEST else checkpointer.steps()
    return step_to_resume(resume, steps, checkpointer.place)


def restore(
    config: Config,
    trainer: Trainer,
    checkpointer: Checkpointer,
    step: int,
    changed: Sequence[Change],
) -> Restored[TrainState]:
    """Return the newest sound step, or `step` if the configuration asks for that one."""
    exact_step = None if config.checkpoint.resume in NEWEST else step
    return checkpointer.restore(trainer.abstract_canonical(), exact_step, optional_parts(changed))


def live_state(trainer: Trainer[StateT], saved: TrainState, changed: Sequence[Change]) -> StateT:
    """Return the trainer's live state; its optimizer state is new if the optimizer was changed."""
    state = trainer.from_canonical(saved)
    return trainer.restart_optimizer(state) if has_other_optimizer(changed) else state


def continue_loader(
    loader: Loader, config: Config, place: BatchPlacer, position: np.ndarray, meta: Meta
) -> Loader:
    """Return a loader that continues at the data position of a checkpoint, one row per sequence."""
    loader.close()
    state = position[place.rows]
    num_before = (meta.get(FINGERPRINT) or {}).get(DOCUMENTS)
    if "data" in config.checkpoint.accept_changes and num_before:
        state = moved_state(state, num_before, loader.num_documents)
    return make_loader(config, "train", place.rows, state)
