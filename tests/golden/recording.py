"""The files with recorded values: reading, writing, and the machine that they come from."""

import json
import platform
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from golden.configurations import CONFIGURATIONS, STEPS, STORED_RUNS
from golden.runner import HERE, log_of, run_all
from golden.values import BFLOAT16_TOLERANCE, TOLERANCE, Values, read_values

VALUES = HERE / "values"
STORED = HERE / "stored"
NAMES = [*CONFIGURATIONS, *STORED_RUNS]
STORED_STEP, LAST_STORED_STEP = 4, 8
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax")


def machine() -> dict[str, str]:
    """Describe what decides the last bits: the processor and the packages that compile."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().split("\n\n")[0].splitlines() if information.exists() else []
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping")
    flags = [f for f in facts.get("flags", "").split() if f.startswith(("avx", "fma", "amx"))]
    cpu = {"machine": platform.machine()}
    cpu |= {key: facts.get(key, platform.processor()) for key in keys}
    return cpu | {"vector flags": " ".join(sorted(flags))} | {p: version(p) for p in _PACKAGES}


def run_and_read(names: Iterable[str], directory: Path) -> dict[str, Values | str]:
    """Run configurations and stored runs with the current code, each in its own new directory.

    Returns name -> values, or what a run printed that did not come to its end.
    """
    jobs = {}
    for name in names:
        if name in CONFIGURATIONS:
            jobs[name] = _words(name, CONFIGURATIONS[name])
        else:
            shutil.copytree(STORED / name, directory / name)
            words = [str(STORED / name / "config.yml"), "checkpoint.resume=must", "stop_after=0"]
            jobs[name] = [*words, f"output_dir={directory}"]
    run_all(jobs, directory)
    results: dict[str, Values | str] = {}
    for name in jobs:
        is_stored = name in STORED_RUNS
        first, last = (STORED_STEP + 1, LAST_STORED_STEP) if is_stored else (1, STEPS)
        try:
            results[name] = read_values(directory / name, first, last)
        except (OSError, ValueError, KeyError) as error:
            results[name] = f"{type(error).__name__}: {error}\n{log_of(name, directory)}"
    return results


def _words(name: str, words: str) -> list[str]:
    return [str(HERE / "base.yml"), f"run_name={name}", *words.split()]


def store_runs(directory: Path) -> None:
    jobs = {name: _words(name, words) for name, words in STORED_RUNS.items()}
    run_all(jobs, directory)
    for name in jobs:
        run, unread = directory / name, shutil.ignore_patterns("tensorboard")
        assert (run / "checkpoints" / str(STORED_STEP)).exists(), log_of(name, directory)
        shutil.copytree(run, STORED / name, ignore=unread)


def load(name: str) -> dict[str, Any]:
    return json.loads((VALUES / f"{name}.json").read_text())


def save(name: str, values: Values, reason: str) -> None:
    file = VALUES / f"{name}.json"
    reasons = [*load(name)["reasons"], reason] if file.exists() else [reason]
    file.parent.mkdir(exist_ok=True)
    # One step or array a line: a change of one is a change of one line.
    tables = []
    for kind, table in values.items():
        lines = [f"      {json.dumps(key)}: {json.dumps(row)}" for key, row in table.items()]
        tables.append(f'    "{kind}": {{\n' + ",\n".join(lines) + "\n    }")
    head = json.dumps({"machine": machine(), "reasons": reasons}, indent=2).removesuffix("\n}")
    file.write_text(head + ',\n  "values": {\n' + ",\n".join(tables) + "\n  }\n}\n")


def tolerance(name: str) -> float:
    is_bfloat16 = "model.dtype=bfloat16" in CONFIGURATIONS.get(name, "")
    return BFLOAT16_TOLERANCE if is_bfloat16 else TOLERANCE
