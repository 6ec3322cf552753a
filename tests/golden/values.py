"""What is recorded of a run, read from its files alone, and how two recordings differ."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the dtype bfloat16
import numpy as np
import tensorstore as ts

TOLERANCE = 1e-5
# A bfloat16 number has 8 bits, and another order of additions may change the last of them.
BFLOAT16_TOLERANCE = 1e-2
# Gradients of queries and keys nearly cancel here: what remains has the errors of larger terms.
STATE_FACTOR = 10

# The results of a run: "steps", by number, with loss and gradient norm as in `metrics.jsonl`, and
# "leaves", the arrays of its last checkpoint by name, as `_describe` returns them.
Values = dict[str, dict[str, Any]]


def read_values(run: Path, first: int, last: int) -> Values:
    """Read the steps from `first` to `last` and the checkpoint of `last` from a run's directory.

    Raises OSError, ValueError or KeyError if the run has not come so far.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {
        str(row["step"]): {key: row[key] for key in ("loss", "grad_norm")}
        for row in rows
        if "loss" in row
    }
    checkpoint = run / "checkpoints" / str(last)
    names = json.loads((checkpoint / "meta" / "metadata").read_text())["leaves"]
    return {
        "steps": {str(step): losses[str(step)] for step in range(first, last + 1)},
        "leaves": {name: _describe(_read(checkpoint, name)) for name in sorted(names)},
    }


def _read(checkpoint: Path, name: str) -> np.ndarray:
    base = {"driver": "file", "path": f"{checkpoint / 'arrays'}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return np.asarray(ts.open(spec, open=True, read=True).result().read().result())


def _describe(array: np.ndarray) -> dict[str, Any]:
    """Return what is recorded of an array.

    `sum` and `norm` (L2) do not depend on the order of the elements; `projection`, the inner
    product with cos(0), cos(1), ..., does. All three are computed in float64.
    """
    flat = array.astype(np.float64).reshape(-1)
    return {
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "sum": float(flat.sum()),
        "norm": float(np.sqrt(flat @ flat)),
        "projection": float(flat @ np.cos(np.arange(flat.size))),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest()[:16],
    }


def differences(recorded: Values, actual: Values) -> dict[str, float]:
    """Compute relative differences by what differs: `step 3 loss`, `params.embed.table norm`.

    A difference that no rounding makes is infinite: a missing step or array, another shape or
    dtype, another integer.
    """
    found: dict[str, float] = {}
    for kind, compare in (("steps", _of_steps), ("leaves", _of_leaves)):
        for name in recorded[kind].keys() | actual[kind].keys():
            pair = recorded[kind].get(name), actual[kind].get(name)
            key = f"step {name}" if kind == "steps" else name
            found |= {f"{key} is missing": math.inf} if None in pair else compare(key, *pair)
    return found


def above(found: dict[str, float], tolerance: float) -> dict[str, float]:
    factors = {key: STATE_FACTOR if key.startswith("opt_state.") else 1 for key in found}
    return {k: size for k, size in sorted(found.items()) if not size <= tolerance * factors[k]}


def _of_steps(name: str, recorded: dict[str, Any], actual: dict[str, Any]) -> dict[str, float]:
    return {f"{name} {k}": _relative(a, actual[k], abs(a)) for k, a in recorded.items()}


def _of_leaves(name: str, recorded: dict[str, Any], actual: dict[str, Any]) -> dict[str, float]:
    if any(recorded[key] != actual[key] for key in ("shape", "dtype")):
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
