"""Read a committed step: first the record, then the arrays, and verify every digest.

The parameters alone may also be read as their mean over several steps of a run. The mean of the
last checkpoints often has a lower evaluation loss than any of them, above all before the learning
rate has decayed (Izmailov et al. 2018, section 3).
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.arrays import Array, differences, load, named_leaves
from maxpipe.checkpoint.digest import digests
from maxpipe.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointUnreadable,
    ReadError,
    first,
    reading_error,
)
from maxpipe.checkpoint.record import ITERATOR, PARAMS, Leaf, Record, step_record
from maxpipe.checkpoint.steps import StepStore
from maxpipe.devices.processes import agree, of_first_process

# What TensorStore raises for damage.
READ_ERRORS = (ValueError, OSError, LookupError, NotImplementedError)

State = TypeVar("State")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Restored(Generic[State]):
    """The contents of a checkpoint."""

    step: int  # training step after which it was saved
    state: State  # pytree with the structure of `abstract_state`
    iterator: np.ndarray  # data position, int64 [rows, columns], all rows in every process
    meta: dict[str, Any]  # the `meta` passed to `Checkpointer.save`
    converted: int  # number of arrays of `state` that were saved with another dtype


def read_step(
    directory: Path,
    abstract_state: State,
    optional: Collection[str] = (),
    convert_dtype: bool = False,
) -> Restored[State]:
    """Read and verify the directory of a committed step; every process calls this.

    With `convert_dtype`, floating arrays may have been saved with another floating dtype. The other
    arguments, and the errors, are those of `maxpipe.checkpoint.manager.Checkpointer.restore`.
    """
    record = _read_record_everywhere(directory)
    # 1. Compare names, shapes and dtypes; optional parts that differ become zeros.
    expected: dict[str, jax.ShapeDtypeStruct] = named_leaves(abstract_state)
    saved = {name: leaf for name, leaf in record.leaves.items() if name != ITERATOR}
    zero_parts = {
        part for part in optional if differences(_part(saved, part), _part(expected, part))
    }
    zeros = {name: leaf for part in zero_parts for name, leaf in _part(expected, part).items()}
    saved = {name: leaf for name, leaf in saved.items() if name.partition(".")[0] not in zero_parts}
    stored = {name: leaf for name, leaf in expected.items() if name not in zeros}
    if lines := differences(saved, stored, any_float=convert_dtype):
        is_only_dtype = not differences(saved, stored, any_float=True)
        raise CheckpointMismatch(directory, lines, is_only_dtype)
    # 2. Read and verify.
    shardings = {name: leaf.sharding for name, leaf in stored.items()}
    arrays = read_arrays(directory, record.leaves, {**shardings, ITERATOR: None})
    iterator = np.asarray(arrays.pop(ITERATOR))
    # 3. Convert, add zeros, and rebuild the tree.
    converted = [
        name for name, leaf in stored.items() if np.dtype(leaf.dtype).name != saved[name].dtype
    ]
    for name in converted:
        arrays[name] = arrays[name].astype(stored[name].dtype)
    for name, leaf in zeros.items():
        arrays[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    leaves = [arrays[name] for name in expected]
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
    return Restored(record.step, state, iterator, record.meta, len(converted))


def verify_step(directory: Path) -> Record:
    """Read the arrays of a step into host memory, one at a time; raises as `read_arrays`."""
    record = step_record(directory)
    for name in record.leaves:
        read_arrays(directory, record.leaves, {name: None})
    return record


def read_arrays(
    directory: Path,
    leaves: Mapping[str, Leaf],
    shardings: Mapping[str, jax.sharding.Sharding | None],
) -> dict[str, Array]:
    """Read the arrays in `shardings` (None = into host memory) and verify them against `leaves`.

    Raises CheckpointDamaged, or CheckpointUnreadable if this machine is at fault (permissions,
    memory) and the checkpoint may be sound.
    """

    def read() -> dict[str, Array]:
        try:
            return dict(load(directory, leaves, shardings))
        except READ_ERRORS as error:
            raise reading_error(directory, error) from error

    # Digests of sharded arrays are collective: none may start while a process lacks an array.
    arrays = in_all(read, directory)
    changed = [name for name, digest in digests(arrays).items() if digest != leaves[name].digest]
    if not agree(not changed):
        names = first(changed) or "an array of another process"
        raise CheckpointDamaged(directory, f"digest of {names} does not match")
    return arrays


def in_all(read: Callable[[], Value], place: object) -> Value:
    """Return what this process reads; if any process cannot, raise the same error in all.

    Otherwise only some would try an older step. Every process calls this.
    """
    failure: ReadError | None = None
    try:
        result = read()
    except ReadError as error:
        failure = error
    if not agree(failure is None):
        is_damaged = agree(not isinstance(failure, CheckpointUnreadable))
        kind = CheckpointDamaged if is_damaged else CheckpointUnreadable
        reason = failure.reason if failure else "another process cannot read it"
        raise kind(place, reason) from failure
    return result


def _read_record_everywhere(directory: Path) -> Record:
    record = in_all(partial(step_record, directory), directory)
    # Each record may be sound, but of another history: replicas in memory are not shared.
    digests_of_all = {name: leaf.digest for name, leaf in record.leaves.items()}
    own = zlib.crc32(json.dumps(digests_of_all).encode())
    if not agree(of_first_process(own) == own):
        raise CheckpointDamaged(directory, "the processes have records of different arrays")
    return record


def _part(leaves: Mapping[str, Value], name: str) -> dict[str, Value]:
    return {path: leaf for path, leaf in leaves.items() if path.partition(".")[0] == name}


class ParameterReader:
    """Reads the parameters of one step of a run, or their mean over several steps.

    A leaf is read from one step at a time, so memory does not grow with the number of steps.

    `leaves` has shape and dtype of each parameter by its name on disk, such as
    `params.embed.table`; `steps` the numbers of the steps; `record` is that of the last one.

    Raises as `read_arrays`, and CheckpointMismatch if the parameters of the steps differ in name,
    shape or dtype.
    """

    def __init__(self, directories: Sequence[Path]):
        self._sources: list[tuple[Path, dict[str, Leaf]]] = []
        self.steps: list[int] = []
        for directory in directories:
            self.record = step_record(directory)
            recorded = self.record.leaves.items()
            self.leaves = {name: leaf for name, leaf in recorded if name.startswith(f"{PARAMS}.")}
            self._sources.append((directory, self.leaves))
            self.steps.append(self.record.step)
        expected = {
            name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for name, leaf in self.leaves.items()
        }
        for directory, leaves in self._sources:
            if lines := differences(leaves, expected):
                raise CheckpointMismatch(directory, lines)

    def read(self, name: str, sharding: jax.sharding.Sharding | None = None) -> Array:
        """Return a parameter as it was saved, or its mean over several steps in float32.

        Without a sharding it is a NumPy array. Raises as `maxpipe.checkpoint.reader`.
        """
        count = len(self.steps)
        total: Any = 0
        for directory, leaves in self._sources:
            array = read_arrays(directory, leaves, {name: sharding})[name]
            if count == 1:
                return array
            total = total + array.astype(np.float32)
        return total / np.float32(count)


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
