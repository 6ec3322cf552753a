"""Predict the step of several configurations on TPUs and print a table, without a chip.

    python scripts/benchmark/predict.py "configs/models/llama3-8b.yml compile.topology=v6e:2x4"
    python scripts/benchmark/predict.py \\
        "shape.yml pipeline.schedule=lockstep_1f1b" "shape.yml pipeline.schedule=circular" \\
        --python other/bin/python

Each argument is a configuration with its overrides; relative paths start where the command runs.
Each is compiled by a process of its own, so that flags in LIBTPU_INIT_ARGS act, and one that fails
leaves the others. The first row is what the last column compares with. Rows that leave out what
others hold are named below the table. Exit code 1 means that some configuration could not be
predicted.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxpipe.compile import DOES_NOT_FIT, FITS
from maxpipe.compile.prediction.constants import Constants

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 2**20, 2**30
PARTS = ("matrix products", "attention kernels", "loop fusions", "copies", "collectives")
HEADER = ("configuration", "step s", *PARTS, "bubble", "MFU %", "temp MiB", "fits", "of first")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile every configuration, print a row as soon as it is there, and then the versions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configurations", nargs="+", metavar='"CONFIG key=value ..."')
    parser.add_argument("--python", default=sys.executable, help="compiles (this one)")
    options = parser.parse_args(argv)
    if shutil.which(options.python) is None:
        parser.error(f"--python {options.python}: there is no such program")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    reference: float | None = None
    bases: set[str] = set()
    differences: dict[str, list[int]] = {}
    failures: list[str] = []
    for configuration in options.configurations:
        report, error = compiled(options.python, configuration)
        seconds = report["predicted_step_seconds"] if report else None
        if report and seconds is not None:
            reference = reference or seconds
            bases.add(basis(report["predicted"], crosses_slices=report["num_slices"] > 1))
            number = 1 + sum(map(len, differences.values()))
            differences.setdefault(left_out(report["predicted"]), []).append(number)
            print(f"| {' | '.join(row(configuration, report, reference))} |", flush=True)
            continue
        failures.append(f"{configuration}: {reason(report) if report else error}")
    for text, numbers in differences.items():
        if text and len(differences) > 1:
            rows = " and ".join(f"row {number}" for number in numbers)
            print(f"\nunlike others, {rows}: {text}")
    for text in sorted(bases):
        print(f"\npredicted by {text}")
    for text in failures:
        print(f"no prediction: {text}", file=sys.stderr)
    return 1 if failures else 0


def compiled(python: str, configuration: str) -> tuple[dict[str, Any] | None, str]:
    """Return the report of `maxpipe.compile`, None if it fails; and the end of its messages."""
    try:
        words = shlex.split(configuration)
    except ValueError as error:
        return None, str(error)
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [python, "-m", "maxpipe.compile", *words, "--json", str(file)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (FITS, DOES_NOT_FIT) or not file.exists():
            return None, (done.stderr.strip() or done.stdout.strip())[-500:]
        return json.loads(file.read_text(encoding="utf-8")), ""


def reason(report: dict[str, Any]) -> str:
    """Return why a report has no prediction."""
    reasons = list((report.get("predicted") or {}).get("unknown") or [])
    if report["fits"] is False:
        needed, capacity = (report["memory"][f"{key}_bytes"] for key in ("needed", "capacity"))
        reasons.insert(0, f"does not fit: {needed / GIB:.1f} of {capacity / GIB:.1f} GiB")
    return "; ".join(reasons) or "needs a TPU's topology, such as compile.topology=v5p:2x2x2"


def row(configuration: str, report: dict[str, Any], reference: float) -> list[str]:
    """Return the cells of a configuration; `reference` is the step of the first one."""
    predicted, memory = report["predicted"], report["memory"]
    seconds = report["predicted_step_seconds"]
    bubble = predicted["bubble"]
    temp = memory.get("temp_bytes")
    fits = {True: "yes", False: "no", None: "?"}[report["fits"]]
    return [
        configuration,
        f"{seconds:.4g}",
        *(f"{predicted['parts'][part]:.3g}" for part in PARTS),
        "" if bubble is None else f"{bubble:.3g}",
        f"{100 * predicted['mfu']:.1f}",
        "" if temp is None else f"{temp / MIB:.0f}",
        fits,
        f"{seconds / reference:.3f}",
    ]


def left_out(predicted: dict[str, Any]) -> str:
    """Return in words what the columns of a row do not hold, "" if that is nothing."""
    words = [f"without {part}" for part in predicted["leaves_out"]]
    if not predicted["bubble_in_parts"]:
        words.append("the bubble is besides the parts")
    return ", ".join(words)


def basis(predicted: dict[str, Any], *, crosses_slices: bool) -> str:
    """Return in words what a prediction rests on."""
    constants = Constants(**predicted["constants"])
    text = constants.text(crosses_slices)
    return f"libtpu {predicted['libtpu']}: {constants.chip} at {text}"


if __name__ == "__main__":
    sys.exit(main())
