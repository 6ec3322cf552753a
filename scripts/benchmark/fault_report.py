"""Judge runs with faults by one without, and show how long they took to recover."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fault_kinds import KINDS

from maxpipe.checkpoint.arrays import load
from maxpipe.checkpoint.record import step_record
from maxpipe.checkpoint.steps import StepsDirectory

ROUNDING = 1e-5  # by which losses on another mesh differ, relatively


class Outcome(NamedTuple):
    """What followed from a fault.

    Attributes:
      kind: of the fault.
      moment: when it came, which may be later than it was drawn.
      seconds: to the next new step; None if another fault came first.
    """

    kind: str
    moment: str
    seconds: float | None


def differences(whole: Path, disturbed: Path, step: int, resized: float = math.inf) -> list[str]:
    """Return how the losses and the last checkpoints of two runs differ.

    Args:
      whole: the directory of a run without faults.
      disturbed: that of the other.
      step: their last one.
      resized: the last step before the other's mesh changed; losses after it may differ by
        `ROUNDING`, and the checkpoint in its bits.
    """
    problems = loss_differences(whole, disturbed, step, resized)
    saved = []
    for run in (whole, disturbed):
        directory = StepsDirectory(run / "checkpoints").of(step)
        leaves = step_record(directory).leaves
        arrays = dict(load(directory, leaves, dict.fromkeys(leaves)))
        saved.append({name: np.asarray(array).tobytes() for name, array in arrays.items()})
    if saved[0].keys() != saved[1].keys():
        problems.append("the last checkpoints hold other arrays")
    names = [name for name in saved[0] if saved[0][name] != saved[1].get(name)]
    if names and resized == math.inf:
        problems.append(f"the last checkpoints differ in {', '.join(names)}")
    return problems


def loss_differences(
    whole: Path, disturbed: Path, step: int, resized: float = math.inf
) -> list[str]:
    """Return how the losses of two runs differ; arguments as for `differences`."""
    problems = []
    logged = [_losses(run) for run in (whole, disturbed)]
    if [step for step, _ in logged[1]] != [*range(1, step + 1)]:
        problems.append("metrics.jsonl has not every step once")
    expected = dict(logged[0])
    other = [
        n
        for n, loss in logged[1]
        if not math.isclose(
            loss, expected.get(n, math.nan), rel_tol=ROUNDING if n > resized else 0.0
        )
    ]
    if other:
        problems.append(f"losses differ from step {other[0]} on")
    return problems


def _losses(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return lines with a row for each kind."""
    lines = [f"{'kind':<20}{'faults':>7}{'save':>6}{'restart':>9}{'median':>10}{'longest':>10}"]
    for kind in KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        lines += [_row(kind, of_kind)] if of_kind else []
    return [*lines, _row("all", outcomes)]


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    moments = [outcome.moment for outcome in outcomes]
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    times = ""
    if seconds:
        times = f"{statistics.median(seconds):>8.1f} s{max(seconds):>8.1f} s"
    counts = f"{len(outcomes):>7}{moments.count('save'):>6}{moments.count('restart'):>9}"
    return f"{name:<20}{counts}{times}"
