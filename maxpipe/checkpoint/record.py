"""A state as a flat table of named arrays, which is what lies on disk, and how two such tables differ.

The record: the JSON part of a checkpoint, which says what the arrays are and carries its own
checksum.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable

ITERATOR = "iterator"  # name of the data position in the table, beside the state's own leaves


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by dotted path (`params.layers.attention.query`), in the tree's order.

    Paths, not containers, are what a checkpoint knows, so that a NamedTuple may become a dataclass
    between versions.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(named) == len(paths), "two leaves share a dotted path"
    assert not named.keys() & {ITERATOR, ""}, (
        "a state is a tree of named leaves, none of them `iterator`"
    )
    return named


def saveable(name: str, leaf: Any) -> jax.Array | np.ndarray:
    """The leaf as an array.

    Raises:
      TypeError: it is not an array of plain numbers.
    """
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} is a typed PRNG key; save jax.random.key_data of it")
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds JAX and NumPy arrays")


@dataclass(frozen=True)
class Leaf:
    """One saved array.

    Attributes:
      shape: global shape in the canonical layout.
      dtype: NumPy name of the dtype, `bfloat16` included.
      digest: see `maxpipe.checkpoint.digest`.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def nbytes(leaf: Leaf) -> int:
    """Bytes of the whole array in memory."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def differences(
    saved: Mapping[str, Leaf], wanted: Mapping[str, Any], any_float: bool = False
) -> list[str]:
    """One line for each array that is missing, unexpected, or of another shape or dtype.

    Args:
      saved: leaves of a checkpoint without the iterator state.
      wanted: name -> anything with a shape and a dtype.
      any_float: whether two floating dtypes are as good as equal.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        here = (
            Leaf(tuple(wanted[name].shape), np.dtype(wanted[name].dtype).name, 0)
            if name in wanted
            else None
        )
        there = saved.get(name)
        if here is None:
            lines.append(f"{name}: {there} in the checkpoint, unknown to this run")
        elif there is None:
            lines.append(f"{name}: {here} in this run, not in the checkpoint")
        elif here.shape != there.shape or (
            here.dtype != there.dtype and not (any_float and _are_floats(here, there))
        ):
            lines.append(f"{name}: {there} in the checkpoint, {here} in this run")
    return lines


def _are_floats(*leaves: Leaf) -> bool:
    return all(jax.dtypes.issubdtype(np.dtype(leaf.dtype), np.floating) for leaf in leaves)


FORMAT = 1
ITEM = "meta"
FILE = "metadata"


@dataclass(frozen=True)
class Record:
    """What is known about a checkpoint besides the arrays' values.

    Attributes:
      step: training step after which it was taken.
      meta: the caller's JSON: configuration, versions.
      leaves: name -> description of every array, iterator state included.
    """

    step: int
    meta: dict[str, Any]
    leaves: dict[str, Leaf]

    def to_json(self) -> dict[str, Any]:
        """JSON object with a checksum over everything else in it.

        Raises:
          TypeError, ValueError: `meta` holds something that JSON does not (objects, NaN).
        """
        content = {
            "format": FORMAT,
            "step": self.step,
            "meta": self.meta,
            "leaves": {name: asdict(leaf) for name, leaf in self.leaves.items()},
        }
        # What is read back has string keys and lists: the checksum must be taken over that.
        content = json.loads(json.dumps(content, allow_nan=False))
        return {**content, "checksum": _checksum(content)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Inverse of `to_json`.

        Raises:
          CheckpointDamaged: the checksum does not match.
          CheckpointUnreadable: it was written in a format that this version does not know.
        """
        content = dict(data)
        if content.pop("checksum", None) != _checksum(content):
            raise CheckpointDamaged("checksum of the record does not match")
        if content["format"] != FORMAT:
            raise CheckpointUnreadable(
                f"checkpoint format {content['format']} is not known to this version (knows {FORMAT}); "
                "read it with the version of maxpipe that wrote it, or a newer one"
            )
        leaves = {
            name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
            for name, leaf in content["leaves"].items()
        }
        return cls(content["step"], content["meta"], leaves)


def record_file(step_directory: Path) -> Path:
    """Where the record of a committed step lies."""
    return step_directory / ITEM / FILE


def read_record(step_directory: Path) -> Record:
    """Reads and checks the record of a committed step.

    Raises:
      CheckpointDamaged: it is missing, unreadable, changed, or belongs to another step.
      CheckpointUnreadable: it was written in a format that this version does not know, or may not
        be read.
    """
    try:
        data = record_file(step_directory).read_bytes()
    except PermissionError as error:
        raise CheckpointUnreadable(f"record cannot be read: {error}") from error
    except OSError as error:
        raise CheckpointDamaged(f"record cannot be read: {error}") from error
    return parse_record(data, step_directory.name.partition(".")[0])


def parse_record(data: bytes, step: str) -> Record:
    """The record of a step from the bytes of its file.

    Raises:
      CheckpointDamaged, CheckpointUnreadable: as `read_record`.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"record cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointDamaged("record is not a JSON object")
    record = Record.from_json(content)
    if str(record.step) != step:
        raise CheckpointDamaged(f"record says step {record.step}")
    return record


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
