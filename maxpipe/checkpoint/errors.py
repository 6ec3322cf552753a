"""Define the errors of checkpoints, one class for each thing that the user has to do."""

import errno
import re
from collections.abc import Sequence
from pathlib import Path

LINES_SHOWN = 20
NAMES_SHOWN = 3


# File system errors that may be transient, or are about this process rather than the file.
_PASSING = "EACCES EAGAIN EINTR EIO EMFILE ENFILE ENOMEM EPERM ESTALE ETIMEDOUT"
PASSING_ERRNOS = frozenset(getattr(errno, name) for name in _PASSING.split())


_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages


def errno_of(error: BaseException) -> int | None:
    """Return the number of the file system's error that this one reports; None if it is another."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else None


def brief(error: Exception) -> str:
    """Return an error on one line; TensorStore's are long, with the reason at their end."""
    text = " ".join(str(error).split()).partition(" [source locations=")[0]
    text = text.partition(" [tensorstore")[0]
    text = text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"
    return f"{type(error).__name__}: {text}"


class CheckpointDamaged(RuntimeError):
    """A committed checkpoint cannot be read, or what was read is not what was saved."""


class ReplicasDamaged(RuntimeError):
    """A replica in memory is damaged; it was dropped, so that the next attempt does without it."""


class CheckpointUnreadable(RuntimeError):
    """A checkpoint that may be sound cannot be read here: a newer version or missing permission."""


class CheckpointSaveError(RuntimeError):
    """A save failed; a background failure is raised at the next step, at the latest at the end."""


class StateNotFinite(RuntimeError):
    """The state to be saved has numbers that are NaN, infinite or close to it; none is saved."""

    def __init__(self, step: int, names: Sequence[str]):
        assert names
        shown = ", ".join(names[:NAMES_SHOWN])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        super().__init__(f"the state after step {step} is not finite ({shown}{more})")


class CheckpointMismatch(ValueError):
    """A sound checkpoint holds other arrays than the run needs; none is silently cast or skipped.

    `differences` has a line for each array that is missing, unexpected, or of another shape or
    dtype; `checkpoint.convert_dtype` would resolve them if they are `is_only_dtype`.
    """

    def __init__(self, directory: Path, differences: Sequence[str], is_only_dtype: bool = False):
        assert differences
        self.differences = tuple(differences)
        lines = [f"  {line}" for line in self.differences[:LINES_SHOWN]]
        if len(self.differences) > LINES_SHOWN:
            lines.append(f"  ... and {len(self.differences) - LINES_SHOWN} more")
        remedy = (
            "Continue with the model.* and optimizer.* it was saved with, "
            "or choose another run_name."
        )
        if is_only_dtype:
            remedy = (
                "checkpoint.convert_dtype=true converts them. "
                f"Otherwise c{remedy.removeprefix('C')}"
            )
        table = "\n".join(lines)
        super().__init__(f"checkpoint {directory} does not fit this run:\n{table}\n{remedy}")
