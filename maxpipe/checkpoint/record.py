"""Describe the arrays of a checkpoint in a JSON record that carries its own checksum.

Imports no JAX.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable, reading_error
from maxpipe.storage.records import Damaged, parse_record, shaped

FORMAT = 1
ITEM = "meta"  # name of the record's directory within a step's directory
FILE = "metadata"
ITERATOR = "iterator"  # name of the data position among the leaves, next to the state's own
PARAMS = "params"  # the part of a state that holds the model


@dataclass(frozen=True)
class Leaf:
    """One saved array: its global shape in the canonical layout, NumPy's name of its dtype
    (`bfloat16` included), and its digest, see `maxpipe.checkpoint.digest`.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Record:
    """Everything about a checkpoint except the values of its arrays."""

    step: int  # after which it was taken
    meta: dict[str, Any]  # the caller's JSON: configuration, versions
    leaves: dict[str, Leaf]  # every array by its name, the data position included

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with a checksum over everything else in it.

        Raises TypeError or ValueError if `meta` holds something that JSON does not (objects, NaN).
        """
        content = {"format": FORMAT, **asdict(self)}
        # JSON turns keys into strings and tuples into lists. The checksum must be taken after that.
        content = json.loads(json.dumps(content, allow_nan=False))
        return {**content, "checksum": _checksum(content)}


def record_file(step_directory: Path) -> Path:
    return step_directory / ITEM / FILE


def step_record(step_directory: Path) -> Record:
    """Read and check the record of a committed step.

    Raises CheckpointDamaged if it is missing, changed, or belongs to another step, and
    CheckpointUnreadable for a format that this version does not know, or if this process cannot
    read it now: it has no permission, or the disk reports an error.
    """
    try:
        data = record_file(step_directory).read_bytes()
    except OSError as error:
        raise reading_error(step_directory, error) from error
    return parse_step_record(data, step_directory)


def parse_step_record(data: bytes, place: Path | str) -> Record:
    """Return the record of a step, at a path or URL, from its bytes; raises as `step_record`."""
    try:
        content = parse_record(data, dict[str, Any])
        if content.pop("checksum", None) != _checksum(content):
            raise CheckpointDamaged(place, "checksum of the record does not match")
        if content.get("format") != FORMAT:
            reason = f"format {content.get('format')} is not known to this version of maxpipe"
            remedy = "read it with the version that wrote it, or a newer one"
            raise CheckpointUnreadable(place, f"{reason} (knows {FORMAT}); {remedy}")
        parts = {name: content.get(name) for name in ("step", "meta", "leaves")}
        record = shaped(parts, Record)
    except Damaged as error:
        raise reading_error(place, error) from error
    if str(record.step) != PurePath(place).name.partition(".")[0]:
        raise CheckpointDamaged(place, f"record says step {record.step}")
    return record


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
