"""Continue a run from one of its steps: choose it, compare it with this start, restore it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.errors import CheckpointMismatch
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.resume import AUTO, NEWEST, RESUME, Job, step_since, step_to_resume
from maxpipe.config.catalog import LR_SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import ACCEPT, Change, group_of, is_allowed, shape_refusals
from maxpipe.config.load import from_record
from maxpipe.config.sections import Config, OptimizerConfig
from maxpipe.config.terminal import Note
from maxpipe.data.chat_template import trained_template
from maxpipe.data.fingerprint import CHANGED, DataChange, DataFingerprint
from maxpipe.data.loader import Loader, make_loader, moved_state
from maxpipe.devices import processes
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.run_directory import Meta, RunDirectory
from maxpipe.training.state import TrainState
from maxpipe.training.trainer import StateT, Trainer
from maxpipe.training.update import learning_rate

FINGERPRINT, VERSIONS = "fingerprint", "versions"  # in a checkpoint's meta
DOCUMENTS = "documents"  # in the fingerprint: number of training documents
_OPTIMIZER = "optimizer.name"
_SAME_RATE = 1e-6  # relative; float32 rounds more finely than this


def followed_once(
    config: Config, checkpointer: Checkpointer, job: Job, log: Callable[[str], None]
) -> Config:
    """Let the run resume from its newest step if an earlier attempt has already gone back.

    All processes call this; see `maxpipe.checkpoint.resume`.
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
    """Set the date that the chat template writes: the one of earlier starts, or today.

    All processes call this.
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


def optional_parts(changed: Sequence[Change]) -> list[str]:
    """Return the parts of a state that are not read if the checkpoint has them in another form.

    The spike filter may be switched on or off, or have another window, in any start.
    """
    return ["history", "opt_state"] if _has_other_optimizer(changed) else ["history"]


def live_state(trainer: Trainer[StateT], saved: TrainState, changed: Sequence[Change]) -> StateT:
    """Return the trainer's live state; its optimizer state is new if the optimizer was changed."""
    state = trainer.from_canonical(saved)
    return trainer.restart_optimizer(state) if _has_other_optimizer(changed) else state


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


def check_continuity(
    directory: RunDirectory, fingerprint: DataFingerprint, meta: Meta, place: str
) -> list[Change]:
    """Return the allowed changes since a checkpoint, keys first, then data.

    Args:
      directory: the run's directory, as this start sees it.
      fingerprint: fingerprint of this start's data.
      meta: the checkpoint's metadata.
      place: where the checkpoint is, for messages.

    Raises:
      ConfigError: something differs that must not, unless `checkpoint.accept_changes` names it.
    """
    if not isinstance(meta.get("config"), Mapping):
        return []
    changed = directory.check(meta, place)
    saved = meta.get(FINGERPRINT)
    if saved is None:
        return changed
    data = _data_changes(fingerprint, saved)
    problems = [
        Problem(
            change.key,
            f"is not what the checkpoints in {place} were made with, {change.kind}: {change.text}; "
            f"{ACCEPT}=[{group_of(change.key)}] continues with the change",
        )
        for change in data
        if not is_allowed(directory.config, change.key)
    ]
    if problems:
        raise ConfigError(*problems, directory.advice(place))
    return changed + [Change(change.key, None, f"{change.kind}: {change.text}") for change in data]


@contextmanager
def naming_shapes(changed: Sequence[Change], directory: RunDirectory) -> Iterator[None]:
    """Name the changed keys if they are the reason why a checkpoint has other arrays."""
    try:
        yield
    except CheckpointMismatch as error:
        place = str(directory.checkpoints)
        if problems := shape_refusals(changed, place):
            raise ConfigError(*problems, directory.advice(place)) from error
        raise


def version_changes(now: Mapping[str, str], saved: object) -> list[Change]:
    """Return the packages whose versions differ from those that a checkpoint records."""
    if not isinstance(saved, Mapping):
        return []
    return [
        Change(name, saved[name], version)
        for name, version in now.items()
        if name in saved and saved[name] != version
    ]


def version_of(meta: Meta) -> str:
    """Return the version of maxpipe that wrote a checkpoint, "" if its record does not say."""
    versions = meta.get(VERSIONS)
    return str(versions.get("maxpipe", "")) if isinstance(versions, Mapping) else ""


def describe_changes(config: Config, changed: Sequence[Change], meta: Meta, step: int) -> list[str]:
    """Return a line for each change since a step, and what else a user should know.

    Args:
      config: the configuration of this start.
      changed: changes from `check_continuity` and `version_changes`.
      meta: metadata of that step's checkpoint.
      step: finished steps.
    """
    lines = [f"changed since step {step}: {change}" for change in changed]
    if meta.get(FINGERPRINT) is None:
        lines.append(
            f"checkpoint {step} has no fingerprint, because an earlier version wrote it: "
            "whether data and tokenizer are still the same is not checked"
        )
    if _has_other_optimizer(changed):
        lines.append("the state of the optimizer begins anew")
    if rate := rate_change(config.optimizer, meta, step):
        lines.append(rate)
    return lines


def rate_change(config: OptimizerConfig, meta: Meta, step: int) -> str:
    """Return a line about a learning rate that jumps at a resume, "" if it does not.

    Args:
      config: `optimizer.*` of this start.
      meta: the checkpoint's metadata.
      step: finished steps.
    """
    if not isinstance(meta.get("config"), Mapping):
        return ""
    finished = jnp.int32(step)
    now = float(learning_rate(config, finished))
    try:
        earlier = from_record(meta["config"]).optimizer
        if earlier.schedule not in LR_SCHEDULES:
            return ""  # its module is not imported now; the changed key is said anyway
        before = float(learning_rate(earlier, finished))
    except ConfigError:
        return ""  # handmade: no run saved it; or a schedule that can no longer be imported
    if abs(now - before) <= _SAME_RATE * max(abs(now), abs(before)):
        return ""
    line = f"the learning rate of step {step + 1} is {now:.3g}; it was to be {before:.3g}"
    fixed = [
        f"optimizer.{name}={getattr(earlier, name)}"
        for name in ("decay_steps", "warmup_steps")
        if getattr(earlier, name) != getattr(config, name)
    ]
    return line + (f", as with {' '.join(fixed)}" if fixed else "")


def _has_other_optimizer(changed: Sequence[Change]) -> bool:
    return any(change.key == _OPTIMIZER for change in changed)


def _data_changes(fingerprint: DataFingerprint, saved: Any) -> list[DataChange]:
    try:
        return fingerprint.changes_since(saved)
    except (TypeError, KeyError, AttributeError, ValueError):
        text = "the fingerprint of the checkpoint has another form; its data cannot be compared"
        return [DataChange(fingerprint.key, CHANGED, text)]
