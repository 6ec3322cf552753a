"""Give tests of the run directory the checkpoints that tests of `checkpoint/` write."""

from checkpoint.conftest import checkpointer, directory, messages, samples

__all__ = ["checkpointer", "directory", "messages", "samples"]
