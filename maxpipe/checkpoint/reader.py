"""Read a committed step: first the record, then the arrays, and verify every digest."""

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.arrays import Array, differences, load, named_leaves
from maxpipe.checkpoint.digest import digests
from maxpipe.checkpoint.errors import (
    PASSING_ERRNOS,
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointUnreadable,
    brief,
    errno_of,
)
from maxpipe.checkpoint.record import ITERATOR, Leaf, Record, step_record
from maxpipe.devices.processes import agree, of_first_process

# What TensorStore raises for damage.
READ_ERRORS = (ValueError, OSError, LookupError, NotImplementedError)
# Status codes, at the start of TensorStore's messages, that are not about the checkpoint.
_LOCAL_STATUS = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
)

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
    """Read and verify one step directory; every process calls this.

    Args:
      directory: a committed step.
      abstract_state: pytree of `jax.ShapeDtypeStruct`; leaves with a sharding come back as
        `jax.Array`s, the others as NumPy arrays.
      optional: top-level names of parts that become zeros if the checkpoint does not hold them with
        the same names, shapes and dtypes.
      convert_dtype: whether floating arrays may have been saved with another floating dtype.

    Raises:
      CheckpointMismatch: the checkpoint is sound but its arrays are not those of `abstract_state`.
      CheckpointDamaged: it cannot be read, or what was read is not what was saved.
      CheckpointUnreadable: it may be sound, but this version or this process cannot read it.
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
    """Read the arrays of a step into host memory, one at a time, and verify them.

    Raises:
      CheckpointDamaged, CheckpointUnreadable: as `read_step`.
    """
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

    Raises:
      CheckpointDamaged: as `read_step`.
      CheckpointUnreadable: this machine is at fault (permissions, memory) and the checkpoint may be
        sound.
    """

    def read() -> dict[str, Array]:
        try:
            return dict(load(directory, leaves, shardings))
        except READ_ERRORS as error:
            kind = CheckpointUnreadable if _is_local(error) else CheckpointDamaged
            raise kind(f"arrays cannot be read: {brief(error)}") from error

    # Digests of sharded arrays are collective: none may start while a process lacks an array.
    arrays = in_all(read, "arrays")
    changed = [name for name, digest in digests(arrays).items() if digest != leaves[name].digest]
    if not agree(not changed):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        names = ", ".join(changed[:3]) + more or "an array of another process"
        raise CheckpointDamaged(f"digest of {names} does not match")
    return arrays


def in_all(read: Callable[[], Value], what: str) -> Value:
    """Return what this process reads; if any process cannot, raise the same error in all.

    Otherwise only some would try an older step. Every process calls this.
    """
    result: Value | None = None
    failure: CheckpointDamaged | CheckpointUnreadable | None = None
    try:
        result = read()
    except (CheckpointDamaged, CheckpointUnreadable) as error:
        failure = error
    if not agree(failure is None):
        is_damaged = agree(not isinstance(failure, CheckpointUnreadable))
        kind = CheckpointDamaged if is_damaged else CheckpointUnreadable
        raise kind(failure or f"{what} cannot be read by another process") from failure
    return cast(Value, result)


def _read_record_everywhere(directory: Path) -> Record:
    record = in_all(partial(step_record, directory), "record")
    # Each record may be sound, but of another history: replicas in memory are not shared.
    digests_of_all = {name: leaf.digest for name, leaf in record.leaves.items()}
    own = zlib.crc32(json.dumps(digests_of_all).encode())
    if not agree(of_first_process(own) == own):
        raise CheckpointDamaged("the processes have records of different arrays")
    return record


def _part(leaves: Mapping[str, Value], name: str) -> dict[str, Value]:
    """Return the leaves below a top-level name."""
    return {path: leaf for path, leaf in leaves.items() if path.partition(".")[0] == name}


def _is_local(error: Exception) -> bool:
    """Return whether the error is about this machine and says nothing about the checkpoint."""
    if errno_of(error) in PASSING_ERRNOS:
        return True
    return isinstance(error, PermissionError) or str(error).startswith(_LOCAL_STATUS)
