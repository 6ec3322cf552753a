"""Read the parameters of a step, or their mean over several steps of a run, leaf by leaf.

The mean of a run's last checkpoints often has a lower evaluation loss than any of them, above all
before the learning rate has decayed (Izmailov et al. 2018, section 3).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from maxpipe.checkpoint.arrays import Array, differences, named_leaves
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.reader import read_arrays
from maxpipe.checkpoint.record import PARAMS, Leaf, step_record
from maxpipe.checkpoint.steps import StepStore

State = TypeVar("State")


class ParameterReader:
    """Reads the parameters of one step of a run, or their mean over several steps.

    A leaf is read from one step at a time, so memory does not grow with the number of steps.

    `leaves` has shape and dtype of each parameter by its name on disk, such as
    `params.embed.table`; `steps` the numbers of the steps; `record` is that of the last one.

    Raises:
      CheckpointMismatch: the parameters of the steps differ in name, shape or dtype.
      CheckpointDamaged, CheckpointUnreadable: see `maxpipe.checkpoint.reader`.
    """

    def __init__(self, directories: Sequence[Path]):
        self._sources: list[tuple[Path, dict[str, Leaf]]] = []
        self.steps: list[int] = []
        for directory in directories:
            with naming_step(directory.name.partition(".")[0], len(directories)):
                self.record = step_record(directory)
            recorded = self.record.leaves.items()
            parameters = {name: leaf for name, leaf in recorded if name.startswith(f"{PARAMS}.")}
            self._sources.append((directory, parameters))
            self.steps.append(self.record.step)
        self.leaves = self._sources[-1][1]
        expected = {
            name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for name, leaf in self.leaves.items()
        }
        for directory, leaves in self._sources[:-1]:
            if lines := differences(leaves, expected):
                raise CheckpointMismatch(directory, lines)

    def read(self, name: str, sharding: jax.sharding.Sharding | None = None) -> Array:
        """Return a parameter as it was saved, or its mean over several steps in float32.

        Without a sharding it is a NumPy array. Raises as `maxpipe.checkpoint.reader`.
        """
        if len(self._sources) == 1:
            ((directory, leaves),) = self._sources
            return read_arrays(directory, leaves, {name: sharding})[name]
        total: Array | None = None
        for step, (directory, leaves) in zip(self.steps, self._sources, strict=True):
            with naming_step(step, len(self.steps)):
                array = read_arrays(directory, leaves, {name: sharding})[name].astype(np.float32)
            total = array if total is None else total + array
        assert total is not None
        return total / np.float32(len(self.steps))


@contextmanager
def open_parameters(store: StepStore, steps: Sequence[int]) -> Iterator[ParameterReader]:
    """Yield a reader of the parameters of committed steps; raises as `ParameterReader`.

    Steps in an object store are all copied to this machine first.
    """
    with ExitStack() as copies:
        yield ParameterReader([copies.enter_context(store.local_copy(step)) for step in steps])


def read_parameters(directories: Sequence[Path], abstract_params: State) -> State:
    """Read and verify the parameters of a step, or their mean over several steps in float32.

    `abstract_params` is `TrainState.params` in the layout on disk, with shardings; the optimizer
    that they were trained with does not matter. Raises as `ParameterReader`.
    """
    reader = ParameterReader(directories)
    expected: dict[str, jax.ShapeDtypeStruct] = named_leaves({PARAMS: abstract_params})
    if lines := differences(reader.leaves, expected):
        raise CheckpointMismatch(directories[-1], lines)
    arrays = [reader.read(name, leaf.sharding) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_params), arrays)


def not_read(store: StepStore, steps: Sequence[int], error: Exception) -> str:
    """Return what a command prints if the parameters of steps, or their mean, cannot be read."""
    if len(steps) == 1:
        return f"error: {store}/{steps[0]}: {error}"
    return f"error: {store}: {error}\ntake a smaller --average or another --step"


@contextmanager
def naming_step(step: int | str, num_steps: int) -> Iterator[None]:
    """Name the step in checkpoint errors raised inside, if it is one of several."""
    try:
        yield
    except (CheckpointDamaged, CheckpointUnreadable) as error:
        if num_steps == 1:
            raise
        raise type(error)(f"step {step}, one of the {num_steps} averaged: {error}") from error
