"""What is recorded of a run, read from its files alone, and how two recordings differ."""

import hashlib
import json
import math
from pathlib import Path
from typing import TypedDict

import ml_dtypes  # noqa: F401  gives NumPy the dtype bfloat16
import numpy as np
import tensorstore as ts

TOLERANCE = 1e-5
# A bfloat16 number has 8 bits, and another order of additions may change the last of them.
BFLOAT16_TOLERANCE = 1e-2
# Gradients of queries and keys nearly cancel here: what remains has the errors of larger terms.
STATE_FACTOR = 10


class Step(TypedDict):
    """What `metrics.jsonl` says of a step."""

    loss: float
    grad_norm: float


class Leaf(TypedDict):
    """One array of a checkpoint.

    `sum` and `norm` (L2) do not depend on the order of the elements; `projection`, the inner
    product with cos(0), cos(1), ..., does. All three are computed in float64. `sha256` is cut to
    16 digits.
    """

    shape: list[int]
    dtype: str
    sum: float
    norm: float
    projection: float
    sha256: str


class Values(TypedDict):
    """The results of a run: its steps by number and the arrays of its last checkpoint by name."""

    steps: dict[str, Step]
    leaves: dict[str, Leaf]


def read_values(run: Path, first: int, last: int) -> Values:
    """Read the steps from `first` to `last` and the checkpoint of `last` from a run's directory.

    Raises:
      OSError, ValueError, KeyError: the run has not come so far.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {
        row["step"]: Step(loss=row["loss"], grad_norm=row["grad_norm"])
        for row in rows
        if "loss" in row
    }
    steps = {str(step): losses[step] for step in range(first, last + 1)}
    checkpoint = run / "checkpoints" / str(last)
    names = json.loads((checkpoint / "meta" / "metadata").read_text())["leaves"]
    return Values(
        steps=steps, leaves={name: _describe(_read(checkpoint, name)) for name in sorted(names)}
    )


def _read(checkpoint: Path, name: str) -> np.ndarray:
    base = {"driver": "file", "path": f"{checkpoint / 'arrays'}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return np.asarray(ts.open(spec, open=True, read=True).result().read().result())


def _describe(array: np.ndarray) -> Leaf:
    flat = array.astype(np.float64).reshape(-1)
    return Leaf(
        shape=list(array.shape),
        dtype=array.dtype.name,
        sum=float(flat.sum()),
        norm=float(np.sqrt(flat @ flat)),
        projection=float(flat @ np.cos(np.arange(flat.size))),
        sha256=hashlib.sha256(array.tobytes()).hexdigest()[:16],
    )


def has_equal_bits(recorded: Values, actual: Values) -> bool:
    """Whether losses, gradient norms and all arrays are the same to the bit."""
    digests = [
        {name: leaf["sha256"] for name, leaf in values["leaves"].items()}
        for values in (recorded, actual)
    ]
    return recorded["steps"] == actual["steps"] and digests[0] == digests[1]


def differences(recorded: Values, actual: Values) -> dict[str, float]:
    """Compute relative differences by what differs: `step 3 loss`, `params.embed.table norm`.

    A difference that no rounding makes is infinite: a missing step or array, another shape or
    dtype, another integer.
    """
    found: dict[str, float] = {}
    for step in recorded["steps"].keys() | actual["steps"].keys():
        found |= _of_steps(f"step {step}", recorded["steps"].get(step), actual["steps"].get(step))
    for name in recorded["leaves"].keys() | actual["leaves"].keys():
        found |= _of_leaves(name, recorded["leaves"].get(name), actual["leaves"].get(name))
    return found


def is_state(key: str) -> bool:
    """Return whether a key of `differences` is of the optimizer's state."""
    return key.startswith("opt_state.")


def above(found: dict[str, float], tolerance: float) -> dict[str, float]:
    """Select the differences above a tolerance, which is `STATE_FACTOR` times wider for state."""
    limits = {key: tolerance * (STATE_FACTOR if is_state(key) else 1) for key in found}
    return {key: size for key, size in sorted(found.items()) if not size <= limits[key]}


def _of_steps(name: str, recorded: Step | None, actual: Step | None) -> dict[str, float]:
    if recorded is None or actual is None:
        return {f"{name} is missing": math.inf}
    pairs = {key: (recorded[key], actual[key]) for key in ("loss", "grad_norm")}
    return {f"{name} {key}": _relative(a, b, abs(a)) for key, (a, b) in pairs.items()}


def _of_leaves(name: str, recorded: Leaf | None, actual: Leaf | None) -> dict[str, float]:
    if recorded is None or actual is None:
        return {f"{name} is missing": math.inf}
    if (recorded["shape"], recorded["dtype"]) != (actual["shape"], actual["dtype"]):
        return {f"{name} has another shape or dtype": math.inf}
    if "int" in recorded["dtype"] or recorded["dtype"] == "bool":
        return {name: 0.0 if recorded["sha256"] == actual["sha256"] else math.inf}
    pairs = {key: (recorded[key], actual[key]) for key in ("sum", "norm", "projection")}
    # Elements of both signs cancel in a sum, which can then be smaller than its rounding errors.
    return {
        f"{name} {key}": _relative(a, b, max(abs(a), recorded["norm"]))
        for key, (a, b) in pairs.items()
    }


def _relative(recorded: float, actual: float, scale: float) -> float:
    if recorded == actual:
        return 0.0
    return abs(recorded - actual) / scale if scale else math.inf
