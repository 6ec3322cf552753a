"""Treat a state as a flat table of named arrays: names, description, comparison, reading.

On disk a step's arrays are one OCDBT database that holds a zarr array per leaf. Orbax writes it.
Here it is read by TensorStore alone: this ignores unchecked side files, starts faster, bounds host
memory, and reports damage as one exception. (Tasks that fail in Orbax's reader fill the terminal
with tracebacks.)
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxpipe.checkpoint.digest import Summary, summaries
from maxpipe.checkpoint.errors import StateNotFinite
from maxpipe.checkpoint.record import ITERATOR, PARAMS, Leaf
from maxpipe.storage.local_files import files_in

if TYPE_CHECKING:
    import tensorstore as ts

ITEM = "arrays"  # name of the database's directory within a step's directory
BYTES_IN_FLIGHT = 2 << 30
_CACHE_BYTES = 100_000_000  # for the database's index, in which every array is looked up

Array = jax.Array | np.ndarray
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # part of an array: (start, stop) per dimension


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by dotted path (`params.layers.attention.query`), in its order.

    A checkpoint knows paths, not containers, so a NamedTuple may become a dataclass between
    versions.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves share a dotted path"
    assert not leaves.keys() & {ITERATOR, ""}, "a leaf has no name, or the name `iterator`"
    return leaves


def saveable(name: str, leaf: object) -> Array:
    """Return the leaf as an array; raises TypeError if it is none."""
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds JAX and NumPy arrays")


def check_finite(step: int, arrays: Mapping[str, Array]) -> dict[str, Summary]:
    """Return the summaries of a state's arrays, by dotted path.

    Raises StateNotFinite for a number that is not finite, or a parameter whose square is not.
    """
    summary_of = summaries(arrays)
    names = [
        name
        for name, (_, nonfinite, nonfinite_squares) in summary_of.items()
        if (nonfinite_squares if PARAMS in name.split(".") else nonfinite)
    ]
    if names:
        raise StateNotFinite(step, names)
    return summary_of


def describe(step: int, arrays: dict[str, Array]) -> dict[str, Leaf]:
    """Return shape, dtype and digest of every array; raises as `check_finite`."""
    return {
        name: Leaf(arrays[name].shape, np.dtype(arrays[name].dtype).name, int(summary.digest))
        for name, summary in check_finite(step, arrays).items()
    }


def differences(
    saved: Mapping[str, Leaf],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    any_float: bool = False,
) -> list[str]:
    """Return one line for each array that is missing, unexpected, or of another shape or dtype.

    `saved` are the leaves of a checkpoint without the data position. With `any_float`, two floating
    dtypes count as equal.
    """
    lines = []
    for name in sorted(saved.keys() | expected.keys()):
        if name not in expected:
            lines.append(f"{name}: {saved[name]} in the checkpoint, unknown to this run")
            continue
        ours = Leaf(tuple(expected[name].shape), np.dtype(expected[name].dtype).name, 0)
        if name not in saved:
            lines.append(f"{name}: {ours} in this run, not in the checkpoint")
            continue
        theirs = saved[name]
        dtypes = {ours.dtype, theirs.dtype}
        are_floats = all(jax.dtypes.issubdtype(np.dtype(dtype), np.floating) for dtype in dtypes)
        same_dtype = len(dtypes) == 1 or (any_float and are_floats)
        if ours.shape != theirs.shape or not same_dtype:
            lines.append(f"{name}: {theirs} in the checkpoint, {ours} in this run")
    return lines


def nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def load(
    step_directory: Path,
    leaves: Mapping[str, Leaf],
    shardings: Mapping[str, jax.sharding.Sharding | None],
) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) for each name in `shardings`, in order, reading `BYTES_IN_FLIGHT` ahead.

    Shapes and dtypes are compared with `leaves` here, digests by the caller. A sharding is that of
    the `jax.Array`, of which only this process's shards are read; None stands for a NumPy array.
    Raises TensorStore's errors for missing or damaged files.
    """
    import tensorstore as ts

    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    pending: deque[tuple[str, dict[Box, ts.Future]]] = deque()

    def finish_oldest() -> tuple[str, Array]:
        name, pieces = pending.popleft()
        return name, _finish(pieces, leaves[name].shape, shardings[name])

    in_flight = 0
    for name, sharding in shardings.items():
        spec = array_spec(step_directory / ITEM, name)
        store = ts.open(spec, open=True, read=True, context=context).result()
        actual = Leaf(tuple(store.shape), store.dtype.name, leaves[name].digest)
        if actual != leaves[name]:  # found before memory is allocated for it
            raise ValueError(f"{name} is {actual}, not {leaves[name]}")
        pending.append((name, _start(store, leaves[name].shape, sharding)))
        in_flight += nbytes(leaves[name])
        while in_flight > BYTES_IN_FLIGHT:
            in_flight -= nbytes(leaves[pending[0][0]])
            yield finish_oldest()
    while pending:
        yield finish_oldest()


def array_spec(database: Path, name: str) -> dict[str, object]:
    base = files_in(database)
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}


def _start(
    store: "ts.TensorStore", shape: Shape, sharding: jax.sharding.Sharding | None
) -> dict[Box, "ts.Future"]:
    """Start reading each distinct piece that this process needs; in one piece if it needs all."""
    if sharding is None or sharding.is_fully_addressable:
        return {box_of((), shape): store.read()}
    pieces = {
        box_of(index, shape): index
        for index in sharding.addressable_devices_indices_map(shape).values()
    }
    return {box: store[index or ()].read() for box, index in pieces.items()}


def _finish(
    pieces: dict[Box, "ts.Future"], shape: Shape, sharding: jax.sharding.Sharding | None
) -> Array:
    """Wait for the pieces and place them on this process's devices."""
    values = {box: np.asarray(future.result()) for box, future in pieces.items()}
    whole = values.get(box_of((), shape))
    if sharding is None:
        return values[box_of((), shape)]
    with jax.enable_x64(True):  # otherwise 64-bit integers lose their upper half
        return jax.make_array_from_callback(
            shape,
            sharding,
            lambda index: values[box_of(index, shape)] if whole is None else whole[index],
        )


def box_of(index: tuple[slice, ...] | None, shape: Shape) -> Box:
    """Return the part of an array that an index selects; an empty index selects all of it."""
    slices = index or (slice(None),) * len(shape)
    return tuple(piece.indices(size)[:2] for piece, size in zip(slices, shape, strict=True))
