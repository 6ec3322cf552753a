"""What can go wrong with a checkpoint, by what the user has to do about it."""

from collections.abc import Sequence
from pathlib import Path

LINES_SHOWN = 20


class CheckpointDamaged(RuntimeError):
    """A committed checkpoint cannot be read, or what was read is not what was saved."""


class CheckpointUnreadable(RuntimeError):
    """A checkpoint that may well be sound cannot be read here: a newer version wrote it, or permission is missing."""


class CheckpointSaveError(RuntimeError):
    """A save failed; one in the background is heard of at the next step, and at the latest at the end."""


class CheckpointMismatch(ValueError):
    """A checkpoint is sound but holds other arrays than the run needs; not mended by casting or skipping unasked.

    Attributes:
      differences: one line per array that is missing, unexpected, or of another shape or dtype.

    Args:
      directory: the checkpoint.
      differences: see above.
      is_only_dtype: whether `checkpoint.convert_dtype` would mend it.
    """

    def __init__(self, directory: Path, differences: Sequence[str], is_only_dtype: bool = False):
        assert differences
        self.differences = tuple(differences)
        shown = [f"  {line}" for line in self.differences[:LINES_SHOWN]]
        if len(self.differences) > LINES_SHOWN:
            shown.append(f"  ... and {len(self.differences) - LINES_SHOWN} more")
        convert = (
            "checkpoint.convert_dtype=true converts them. Otherwise c" if is_only_dtype else "C"
        )
        super().__init__(
            f"checkpoint {directory} does not fit this run:\n"
            + "\n".join(shown)
            + f"\n{convert}ontinue with the model.* and optimizer.* it was saved with, or choose another run_name."
        )
