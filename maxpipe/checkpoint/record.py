"""Describe the arrays of a checkpoint in a JSON record that carries its own checksum.

Imports no JAX.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxpipe.checkpoint.errors import (
    PASSING_ERRNOS,
    CheckpointDamaged,
    CheckpointUnreadable,
    errno_of,
)
from maxpipe.storage.records import Damaged, parse_record, read_record, shaped

FORMAT = 1
ITEM = "meta"  # name of the record's directory within a step's directory
FILE = "metadata"
ITERATOR = "iterator"  # name of the data position among the leaves, next to the state's own
PARAMS = "params"  # the part of a state that holds the model


@dataclass(frozen=True)
class Leaf:
    """One saved array.

    Attributes:
      shape: global shape in the canonical layout.
      dtype: NumPy name of the dtype, `bfloat16` included.
      digest: 32-bit digest, see `maxpipe.checkpoint.digest`.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Record:
    """Everything about a checkpoint except the values of its arrays.

    Attributes:
      step: training step after which it was taken.
      meta: the caller's JSON: configuration, versions.
      leaves: name -> description of every array, iterator state included.
    """

    step: int
    meta: dict[str, Any]
    leaves: dict[str, Leaf]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a checksum over everything else in it.

        Raises:
          TypeError, ValueError: `meta` holds something that JSON does not (objects, NaN).
        """
        content = {"format": FORMAT, **asdict(self)}
        # JSON turns keys into strings and tuples into lists. The checksum must be taken after that.
        content = json.loads(json.dumps(content, allow_nan=False))
        return {**content, "checksum": _checksum(content)}


def record_file(step_directory: Path) -> Path:
    """Return the path of the record of a committed step."""
    return step_directory / ITEM / FILE


def step_record(step_directory: Path) -> Record:
    """Read and check the record of a committed step.

    Raises:
      CheckpointDamaged: it is missing, unreadable, changed, or belongs to another step.
      CheckpointUnreadable: it was written in a format that this version does not know, or this
        process cannot read it now: it has no permission, or the disk reports an error.
    """
    file = record_file(step_directory)
    try:
        content = read_record(file, dict[str, Any])
    except Damaged as error:
        kind = CheckpointUnreadable if errno_of(error) in PASSING_ERRNOS else CheckpointDamaged
        raise kind(f"record cannot be read: {error}") from error
    return _from_json(content, step_directory.name.partition(".")[0])


def parse_step_record(data: bytes, step: str) -> Record:
    """Return the record of a step from the bytes of its file; raises as `step_record`."""
    try:
        return _from_json(parse_record(data, dict[str, Any]), step)
    except Damaged as error:
        raise CheckpointDamaged(f"record cannot be read: {error}") from error


def _from_json(data: Mapping[str, Any], step: str) -> Record:
    """Return the record of a step that `to_json` was called on; raises as `step_record`."""
    content = dict(data)
    if content.pop("checksum", None) != _checksum(content):
        raise CheckpointDamaged("checksum of the record does not match")
    if content.get("format") != FORMAT:
        raise CheckpointUnreadable(
            f"checkpoint format {content.get('format')} is not known to this version "
            f"(knows {FORMAT}); read it with the version of maxpipe that wrote it, or a newer one"
        )
    try:
        parts = {name: content.get(name) for name in ("step", "meta", "leaves")}
        record = shaped(parts, Record)
    except Damaged as error:
        raise CheckpointDamaged(f"record has not the form of one: {error}") from error
    if str(record.step) != step:
        raise CheckpointDamaged(f"record says step {record.step}")
    return record


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
