"""Arrays of a committed step, read with TensorStore: one OCDBT database that holds a zarr array per leaf.

Orbax writes the database. Reading it without Orbax keeps unchecked side files out of the way,
starts faster, bounds host memory, and reports damage as one exception (Orbax's reader leaves failed
tasks behind, which fill the terminal with tracebacks).

Reading a committed step: record first, then arrays, and nothing is believed before its digest
matches."""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxpipe.checkpoint.record import Leaf, nbytes

if TYPE_CHECKING:
    import tensorstore as ts
from collections.abc import Collection
from dataclasses import dataclass

import jax.numpy as jnp

from maxpipe.checkpoint.digest import digests
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.record import ITERATOR, Record, differences, named_leaves, read_record
from maxpipe.devices.processes import agree

ITEM = "arrays"
BYTES_IN_FLIGHT = 2 << 30
_CACHE_BYTES = 100_000_000  # the database's index, which every array looks itself up in

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def load(
    step_directory: Path,
    leaves: Mapping[str, Leaf],
    shardings: Mapping[str, jax.sharding.Sharding | None],
) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) for each name in `shardings`, in order; reads ahead up to `BYTES_IN_FLIGHT`.

    Args:
      step_directory: a committed step.
      leaves: what the arrays are expected to be; what they are is not checked here.
      shardings: name -> layout of the `jax.Array` wanted (only this process's shards are read), or
        None for NumPy.

    Raises:
      ValueError, OSError, ...: whatever TensorStore makes of missing or damaged files.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    pending: deque[tuple[str, dict[Box, ts.Future]]] = deque()

    def finish_oldest() -> tuple[str, Any]:
        name, pieces = pending.popleft()
        return name, _finish(pieces, leaves[name].shape, shardings[name])

    in_flight = 0
    for name, sharding in shardings.items():
        pending.append(
            (
                name,
                _start(_open(step_directory / ITEM, name, context), leaves[name].shape, sharding),
            )
        )
        in_flight += nbytes(leaves[name])
        while in_flight > BYTES_IN_FLIGHT:
            in_flight -= nbytes(leaves[pending[0][0]])
            yield finish_oldest()
    while pending:
        yield finish_oldest()


def _open(database: Path, name: str, context: "ts.Context") -> "ts.TensorStore":
    import tensorstore as ts

    base = {"driver": "file", "path": f"{database}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return ts.open(spec, open=True, read=True, context=context).result()


def _start(
    store: "ts.TensorStore", shape: Shape, sharding: jax.sharding.Sharding | None
) -> dict[Box, "ts.Future"]:
    """Starts reading every distinct piece this process needs; if it needs all of them, the array as one."""
    if sharding is None or sharding.is_fully_addressable:
        return {_box((), shape): store.read()}
    pieces = {
        _box(index, shape): index
        for index in sharding.addressable_devices_indices_map(shape).values()
    }
    return {box: store[index or ()].read() for box, index in pieces.items()}


def _finish(
    pieces: dict[Box, "ts.Future"], shape: Shape, sharding: jax.sharding.Sharding | None
) -> Any:
    values = {box: np.asarray(future.result()) for box, future in pieces.items()}
    if sharding is None:
        return values[_box((), shape)]
    with jax.enable_x64(True):  # or 64-bit integers would lose their upper half
        if sharding.is_fully_addressable:
            return jax.device_put(values[_box((), shape)], sharding)
        placed = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            where = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            placed.append(jax.device_put(values[_box(index, shape)], where))
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _box(index: tuple[slice, ...] | None, shape: Shape) -> Box:
    """The part of an array that an index selects, as (start, stop) per dimension; no index selects all."""
    slices = index or (slice(None),) * len(shape)
    return tuple(piece.indices(size)[:2] for piece, size in zip(slices, shape, strict=True))


BATCH_BYTES = 1 << 30
PARAMS = "params"  # the part of a state that holds the model
READ_ERRORS = (
    ValueError,
    OSError,
    LookupError,
    NotImplementedError,
)  # what TensorStore makes of damage
# Status codes that TensorStore puts before the message of the ValueError it raises.
_OWN_TROUBLE = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
)


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held.

    Attributes:
      step: training step after which it was saved.
      state: pytree like the `abstract_state` asked for.
      iterator: [rows, columns] int64, every row in every process.
      meta: what was given to `Checkpointer.save`.
      converted: arrays of `state` that were saved with another dtype.
    """

    step: int
    state: Any
    iterator: np.ndarray
    meta: dict[str, Any]
    converted: int = 0


def read_step(
    directory: Path,
    abstract_state: Any,
    optional: Collection[str] = (),
    convert_dtype: bool = False,
) -> Restored:
    """Reads and verifies one step directory; every process calls it.

    Args:
      directory: a committed step.
      abstract_state: pytree of `jax.ShapeDtypeStruct`; leaves with a sharding come back as
        `jax.Array`s, the others as NumPy arrays.
      optional: top-level names of parts that are zeros unless the checkpoint holds just such ones.
      convert_dtype: floating arrays may have been saved with another floating dtype.

    Raises:
      CheckpointMismatch: the checkpoint is sound but its arrays are not those of `abstract_state`.
      CheckpointDamaged: it cannot be read, or what was read is not what was saved.
      CheckpointUnreadable: it may be sound, but not be read by this version or this process.
    """
    record = _read_record_everywhere(directory)
    wanted = named_leaves(abstract_state)
    saved = {name: leaf for name, leaf in record.leaves.items() if name != ITERATOR}
    fresh = {part for part in optional if differences(_part(saved, part), _part(wanted, part))}
    zeros = {name: leaf for part in fresh for name, leaf in _part(wanted, part).items()}
    saved = {name: leaf for name, leaf in saved.items() if name.partition(".")[0] not in fresh}
    wanted = {name: leaf for name, leaf in wanted.items() if name not in zeros}
    if lines := differences(saved, wanted, any_float=convert_dtype):
        is_only_dtype = not differences(saved, wanted, any_float=True)
        raise CheckpointMismatch(directory, lines, is_only_dtype)
    shardings = {name: getattr(leaf, "sharding", None) for name, leaf in wanted.items()}
    arrays = read_arrays(directory, record.leaves, {**shardings, ITERATOR: None})
    iterator = arrays.pop(ITERATOR)
    others = [
        name for name, leaf in wanted.items() if np.dtype(leaf.dtype).name != saved[name].dtype
    ]
    for name in others:
        arrays[name] = arrays[name].astype(wanted[name].dtype)
    arrays |= {
        n: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for n, leaf in zeros.items()
    }
    leaves = [arrays[name] for name in named_leaves(abstract_state)]
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
    return Restored(record.step, state, iterator, record.meta, len(others))


def read_parameters(directory: Path, abstract_params: Any) -> Any:
    """The parameters of a step and nothing else of it, verified, whatever optimizer they were trained with.

    Args:
      directory: a committed step.
      abstract_params: like `TrainState.params` in the layout on disk; leaves as for `read_step`.

    Raises:
      CheckpointMismatch, CheckpointDamaged, CheckpointUnreadable: as `read_step`.
    """
    record = _read_record_everywhere(directory)
    wanted = named_leaves({PARAMS: abstract_params})
    if lines := differences(_part(record.leaves, PARAMS), wanted):
        raise CheckpointMismatch(directory, lines)
    arrays = read_arrays(
        directory, record.leaves, {n: getattr(x, "sharding", None) for n, x in wanted.items()}
    )
    return jax.tree.unflatten(jax.tree.structure(abstract_params), list(arrays.values()))


def _part(leaves: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {path: leaf for path, leaf in leaves.items() if path.partition(".")[0] == name}


def verify_step(directory: Path) -> Record:
    """Reads a whole step through host memory, about `BATCH_BYTES` at a time, and checks every digest.

    Raises:
      CheckpointDamaged, CheckpointUnreadable: as `read_step`.
    """
    record = read_record(directory)
    for names in _batches(record.leaves):
        read_arrays(directory, record.leaves, dict.fromkeys(names))
    return record


def read_arrays(
    directory: Path,
    leaves: Mapping[str, Leaf],
    shardings: Mapping[str, jax.sharding.Sharding | None],
) -> dict[str, Any]:
    """Reads the arrays named in `shardings` (None = into host memory) and checks them against `leaves`.

    Raises:
      CheckpointDamaged: as `read_step`.
      CheckpointUnreadable: this machine is at fault (permissions, memory) and the checkpoint may be
        sound.
    """
    arrays: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        for name, array in load(directory, leaves, shardings):
            if (array.shape, array.dtype.name) != (leaves[name].shape, leaves[name].dtype):
                raise ValueError(
                    f"{name} is {array.dtype.name}{list(array.shape)}, not {leaves[name]}"
                )
            arrays[name] = array
    except READ_ERRORS as error:
        failure = error
    # Digests of sharded arrays are collective: none may start while another process has nothing to
    # add.
    if not agree(failure is None):
        if failure is None:
            raise CheckpointDamaged("arrays cannot be read by another process")
        kind = CheckpointUnreadable if _is_own_trouble(failure) else CheckpointDamaged
        raise kind(f"arrays cannot be read: {_brief(failure)}") from failure
    changed = [name for name, digest in digests(arrays).items() if digest != leaves[name].digest]
    if not agree(not changed):
        raise CheckpointDamaged(
            f"digest of {_some(changed) or 'an array of another process'} does not match"
        )
    return arrays


def _read_record_everywhere(directory: Path) -> Record:
    record, problem = None, "record cannot be read by another process"
    try:
        record = read_record(directory)
    except CheckpointDamaged as error:
        problem = str(error)
    if not agree(record is not None):
        raise CheckpointDamaged(problem)
    assert record is not None
    return record


def _is_own_trouble(error: Exception) -> bool:
    """Whether the error is this machine's and says nothing about the checkpoint."""
    return isinstance(error, PermissionError) or str(error).startswith(_OWN_TROUBLE)


def _batches(leaves: Mapping[str, Leaf]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, leaf in leaves.items():
        batch.append(name)
        size += nbytes(leaf)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {text[:400]}"
