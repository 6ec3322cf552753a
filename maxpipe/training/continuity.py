"""Compare a run that resumes with its checkpoint: what they share, what was changed since."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp

from maxpipe.checkpoint.errors import CheckpointMismatch
from maxpipe.config.catalog import LR_SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import ACCEPT, Change, group_of, is_allowed, shape_refusals
from maxpipe.config.load import from_record
from maxpipe.config.sections import Config, OptimizerConfig
from maxpipe.data.fingerprint import APPENDED, CHANGED, FRAMED, DataChange, DataFingerprint
from maxpipe.training.optimizer import learning_rate
from maxpipe.training.run_directory import Meta, RunDirectory

FINGERPRINT = "fingerprint"  # in a checkpoint's meta
VERSIONS = "versions"
OPTIMIZER = "optimizer.name"
DOCUMENTS = "documents"  # in the fingerprint: number of training documents
_SAME_RATE = 1e-6  # relative; float32 rounds more finely than this


def check_continuity(
    config: Config,
    fingerprint: DataFingerprint,
    meta: Meta,
    directory: RunDirectory,
    place: str,
) -> list[Change]:
    """Return the allowed changes since a checkpoint, keys first, then data.

    Args:
      config: the resolved configuration of this start.
      fingerprint: fingerprint of this start's data.
      meta: the checkpoint's metadata.
      directory: the run's directory.
      place: where the checkpoint is, for messages.

    Raises:
      ConfigError: something differs that must not, unless `checkpoint.accept_changes` names it.
    """
    if not isinstance(meta.get("config"), Mapping):
        return []
    changed = directory.check(config, meta, place)
    saved = meta.get(FINGERPRINT)
    if saved is None:
        return changed
    data = _data_changes(fingerprint, saved)
    problems = [
        Problem(change.key, _refusal(change, place))
        for change in data
        if not is_allowed(config, change.key)
    ]
    if problems:
        raise ConfigError(*problems, directory.advice(place))
    changed += [Change(change.key, None, f"{change.kind}: {change.text}") for change in data]
    return changed


def optional_parts(changed: Sequence[Change]) -> list[str]:
    """Return the parts of a state that are not read if the checkpoint has them in another form.

    The spike filter may be switched on or off, or have another window, in any start.
    """
    return ["history", "opt_state"] if has_other_optimizer(changed) else ["history"]


def has_other_optimizer(changed: Sequence[Change]) -> bool:
    """Return whether a checkpoint has the state of another optimizer, which is of no use."""
    return any(change.key == OPTIMIZER for change in changed)


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
    if has_other_optimizer(changed):
        lines.append("the state of the optimizer begins anew")
    if rate := rate_change(config.optimizer, meta, step):
        lines.append(rate)
    return lines


def _data_changes(fingerprint: DataFingerprint, saved: Any) -> list[DataChange]:
    try:
        return fingerprint.changes_since(saved)
    except (TypeError, KeyError, AttributeError, ValueError):
        text = "the fingerprint of the checkpoint has another form; its data cannot be compared"
        return [DataChange(fingerprint.key, CHANGED, text)]


def _refusal(change: DataChange, place: str) -> str:
    consequence = "documents would be counted, held out and ordered differently"
    if change.kind == APPENDED:
        consequence = (
            "held-out documents stay held out, but with data.shuffle documents of this epoch "
            "come again or are left out"
        )
    if change.kind == FRAMED:
        consequence = "documents would begin or end differently"
    elif change.key == "data.tokenizer":
        consequence = "the same token ids would mean other text"
    return (
        f"is not what the checkpoints in {place} were made with, {change.kind}: {change.text}; "
        f"{consequence}. {ACCEPT}=[{group_of(change.key)}] continues with the change"
    )
