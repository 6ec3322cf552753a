"""Define the errors of checkpoints, one class for each thing that the user has to do."""

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from maxpipe.storage.records import Damaged

LINES_SHOWN = 20

# Errors that may be transient, or are about this process rather than the file: of the file system,
# and status codes at the start of TensorStore's messages.
_PASSING = "EACCES EAGAIN EINTR EIO EMFILE ENFILE ENOMEM EPERM ESTALE ETIMEDOUT"
_PASSING_STATUS = "PERMISSION_DENIED RESOURCE_EXHAUSTED UNAVAILABLE DEADLINE_EXCEEDED CANCELLED"
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages


def errno_of(error: BaseException) -> int | None:
    """Return the number of the file system's error that this one reports; None if it is another."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def brief(error: Exception) -> str:
    """Return an error on one line, without the places in TensorStore's source."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split()).partition(" [source locations=")[0]
    text = text.partition(" [tensorstore")[0]
    return text if isinstance(error, Damaged) else f"{type(error).__name__}: {text}"


class ReadError(RuntimeError):
    """A checkpoint, at a path or URL, was not read."""

    state = "not read"

    def __init__(self, place: object, reason: object):
        super().__init__(f"checkpoint {place} is {self.state}: {reason}")
        self.reason = str(reason)


class CheckpointDamaged(ReadError):
    """A committed checkpoint cannot be read, or what was read is not what was saved."""

    state = "damaged"


class CheckpointUnreadable(ReadError):
    """A checkpoint that may be sound cannot be read here: a newer version or missing permission."""

    state = "unreadable here"


class NoCheckpoint(RuntimeError):
    """Nothing is saved, and no replica in memory is sound; damaged ones were dropped."""


def reading_error(place: object, error: Exception) -> ReadError:
    """Return the error of a checkpoint that another error, of a library, is about."""
    is_passing = errno.errorcode.get(errno_of(error) or 0) in _PASSING.split()
    is_passing |= isinstance(error, PermissionError)
    is_passing |= str(error).startswith(tuple(_PASSING_STATUS.split()))
    return (CheckpointUnreadable if is_passing else CheckpointDamaged)(place, brief(error))


class CheckpointSaveError(RuntimeError):
    """A save failed; a background failure is raised at the next step, at the latest at the end."""


class StateNotFinite(RuntimeError):
    """The state to be saved has numbers that are NaN, infinite or close to it; none is saved."""

    def __init__(self, step: int, names: Sequence[str]):
        super().__init__(f"the state after step {step} is not finite ({first(names)})")


class CheckpointMismatch(ValueError):
    """A sound checkpoint holds other arrays than the run needs; none is silently cast or skipped.

    `differences` has a line for each array that is missing, unexpected, or of another shape or
    dtype; `checkpoint.convert_dtype` would resolve them if they are `is_only_dtype`.
    """

    def __init__(self, directory: Path, differences: Sequence[str], is_only_dtype: bool = False):
        self.differences = tuple(differences)
        lines = [f"checkpoint {directory} does not fit this run:"]
        lines += [f"  {line}" for line in self.differences[:LINES_SHOWN]]
        if len(self.differences) > LINES_SHOWN:
            lines.append(f"  ... and {len(self.differences) - LINES_SHOWN} more")
        if is_only_dtype:
            lines.append("checkpoint.convert_dtype=true converts them.")
        start = "Or continue" if is_only_dtype else "Continue"
        remedy = "with the model.* and optimizer.* it was saved with, or choose another run_name."
        lines.append(f"{start} {remedy}")
        super().__init__("\n".join(lines))


def first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
