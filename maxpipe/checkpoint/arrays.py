"""Arrays of a committed step, read with TensorStore: one OCDBT database that holds a zarr array per leaf.

Orbax writes the database. Reading it without Orbax keeps unchecked side files out of the way, starts faster,
bounds host memory, and reports damage as one exception (Orbax's reader leaves failed tasks behind, which
fill the terminal with tracebacks).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxpipe.checkpoint.leaves import nbytes
from maxpipe.checkpoint.record import Leaf

if TYPE_CHECKING:
    import tensorstore as ts

ITEM = "arrays"
BYTES_IN_FLIGHT = 2 << 30
_CACHE_BYTES = 100_000_000  # the database's index, which every array looks itself up in

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def load(
    step_directory: Path, leaves: Mapping[str, Leaf], shardings: Mapping[str, jax.sharding.Sharding | None]
) -> Iterator[tuple[str, Any]]:
    """Yields (name, array) for each name in `shardings`, in order; reads ahead up to `BYTES_IN_FLIGHT`.

    Args:
      step_directory: a committed step.
      leaves: what the arrays are expected to be; what they are is not checked here.
      shardings: name -> layout of the `jax.Array` wanted (only this process's shards are read), or None for
        NumPy.

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
            (name, _start(_open(step_directory / ITEM, name, context), leaves[name].shape, sharding))
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
    pieces = {_box(index, shape): index for index in sharding.addressable_devices_indices_map(shape).values()}
    return {box: store[index or ()].read() for box, index in pieces.items()}


def _finish(pieces: dict[Box, "ts.Future"], shape: Shape, sharding: jax.sharding.Sharding | None) -> Any:
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
