"""Describe the arrays of a checkpoint in a JSON record that carries its own checksum.

Imports no JAX.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from maxpipe.checkpoint.errors import PASSING_ERRNOS, CheckpointDamaged, CheckpointUnreadable

FORMAT = 1
ITEM = "meta"  # name of the record's directory within a step's directory
FILE = "metadata"
# NumPy names of all dtypes that a state may have.
DTYPES = frozenset(("bool", "bfloat16", "float16", "float32", "float64")) | frozenset(
    f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32, 64)
)
ITERATOR = "iterator"  # name of the data position among the leaves, next to the state's own


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
        content = {
            "format": FORMAT,
            "step": self.step,
            "meta": self.meta,
            "leaves": {name: asdict(leaf) for name, leaf in self.leaves.items()},
        }
        # JSON turns keys into strings and tuples into lists. The checksum must be taken after that.
        content = json.loads(json.dumps(content, allow_nan=False))
        return {**content, "checksum": _checksum(content)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Record":
        """Return the record that `to_json` was called on.

        Raises:
          CheckpointDamaged: the checksum does not match, or the contents are not those of a record.
          CheckpointUnreadable: it was written in a format that this version does not know.
        """
        content = dict(data)
        if content.pop("checksum", None) != _checksum(content):
            raise CheckpointDamaged("checksum of the record does not match")
        if content.get("format") != FORMAT:
            raise CheckpointUnreadable(
                f"checkpoint format {content.get('format')} is not known to this version "
                f"(knows {FORMAT}); read it with the version of maxpipe that wrote it, "
                "or a newer one"
            )
        try:
            leaves = {
                name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
                for name, leaf in content["leaves"].items()
            }
            record = cls(content["step"], content["meta"], leaves)
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"record has not the form of one: {error!r}") from error
        if problem := record._problem():
            raise CheckpointDamaged(f"record has not the form of one: {problem}")
        return record

    def _problem(self) -> str:
        """Return what in the record no save would have written; "" if there is nothing."""
        if type(self.step) is not int:
            return "step is not a number"
        if not isinstance(self.meta, dict):
            return "meta is not an object"
        if not isinstance(self.meta.get("config", {}), dict):
            return "config is not an object"
        if not isinstance(self.meta.get("eval_loss"), int | float | None):
            return "eval_loss is not a number"
        if ITERATOR not in self.leaves:
            return "there is no data position"
        for name, leaf in self.leaves.items():
            if not all(isinstance(size, int) and size >= 0 for size in leaf.shape):
                return f"the shape of {name} is {list(leaf.shape)}"
            if not isinstance(leaf.dtype, str) or leaf.dtype not in DTYPES:
                return f"the dtype of {name} is {leaf.dtype!r}"
            if type(leaf.digest) is not int:
                return f"the digest of {name} is {leaf.digest!r}"
        return ""


def record_file(step_directory: Path) -> Path:
    """Return the path of the record of a committed step."""
    return step_directory / ITEM / FILE


def read_record(step_directory: Path) -> Record:
    """Read and check the record of a committed step.

    Raises:
      CheckpointDamaged: it is missing, unreadable, changed, or belongs to another step.
      CheckpointUnreadable: it was written in a format that this version does not know, or this
        process cannot read it now: it has no permission, or the disk reports an error.
    """
    file = record_file(step_directory)
    try:
        if file.exists() and not file.is_file():
            raise CheckpointDamaged("record cannot be read: it is not a regular file")
        data = file.read_bytes()
    except OSError as error:
        is_passing = error.errno in PASSING_ERRNOS
        kind = CheckpointUnreadable if is_passing else CheckpointDamaged
        raise kind(f"record cannot be read: {error}") from error
    return parse_record(data, step_directory.name.partition(".")[0])


def parse_record(data: bytes, step: str) -> Record:
    """Return the record of a step from the bytes of its file.

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
