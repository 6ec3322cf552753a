"""TensorBoard events through tensorboardX."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Writes scalars to `directory`; points that an earlier process wrote after `last_step` are hidden."""

    def __init__(self, directory: Path, last_step: int):
        # Imported here: it takes a quarter of a second that only the process which writes should
        # pay.
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1)

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """One point per name that has a value."""
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
