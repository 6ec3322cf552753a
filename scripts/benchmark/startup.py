"""Measure the train command's time to a validated configuration and to its first step."""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from process_time import cpu_seconds

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
SETTINGS = (
    "mesh.simulated_devices=8",
    "mesh.ici.stage=4",
    "mesh.ici.fsdp=2",
    "pipeline.num_microbatches=8",
    "model.num_layers=8",
    "model.embed_dim=256",
    "model.mlp_dim=1024",
    "model.vocab_size=1024",
    "data.sequence_length=256",
    "data.global_batch_size=32",
    "eval.every=0",
    "checkpoint.every=0",
    "telemetry.log_every=1",
    f"steps={STEPS}",
)
ENGINES = {
    "sequential": ("mesh.ici.stage=1", "mesh.ici.fsdp=8", "pipeline.num_microbatches=1"),
    "circular": ("pipeline.schedule=circular",),
    "lockstep_1f1b": ("pipeline.schedule=lockstep_1f1b",),
}


def run(directory: Path, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Start the command repeatedly, engines in turns, with an empty and then a warm cache.

    Args:
      directory: an empty directory for runs and caches.
      rounds: starts of each kind.
      say: told of each start.

    Returns:
      Rows with "what", "seconds" and "cpu" (CPU seconds), lists of one entry per round. First steps
      are less one median step, so that they hold start-up and compilation alone.
    """
    rows: list[Row] = [{"what": "validated configuration", "seconds": [], "cpu": []}]
    for _ in range(rounds):
        _add(rows[0], _validate())
    for name in ENGINES:
        for cache in ("empty", "warm"):
            rows.append({"what": f"first step, {name}, {cache} cache", "seconds": [], "cpu": []})
    for _ in range(rounds):
        for name in ENGINES:
            shutil.rmtree(directory, ignore_errors=True)
            for cache in ("empty", "warm"):
                times = _first_step(directory, cache, ENGINES[name])
                say(f"{name}, {cache} cache: {times[0]:.1f} s, {times[1]:.1f} CPU s")
                _add(
                    next(r for r in rows if r["what"] == f"first step, {name}, {cache} cache"),
                    times,
                )
    return rows


def _add(row: Row, times: tuple[float, float]) -> None:
    row["seconds"].append(times[0])
    row["cpu"].append(times[1])


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| from the command to | median s | least s | CPU s |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        median, cpu = statistics.median(row["seconds"]), statistics.median(row["cpu"])
        lines.append(f"| {row['what']} | {median:.2f} | {min(row['seconds']):.2f} | {cpu:.2f} |")
    return "\n".join(lines)


def _command(*words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "maxpipe.train",
        str(ROOT / "configs" / "base.yml"),
        *SETTINGS,
        *words,
    ]


def _environment() -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_COMPILATION_CACHE")
    }
    return own | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _validate() -> tuple[float, float]:
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        _command("--print-config"), env=_environment(), check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - started, cpu


def _first_step(directory: Path, name: str, words: Sequence[str]) -> tuple[float, float]:
    """Return seconds and CPU seconds from start to the line of step 1, less one median step."""
    command = _command(
        *words,
        f"output_dir={directory}",
        f"run_name={name}",
        f"compile.cache_dir={directory}/cache",
    )
    started, times, output = time.perf_counter(), [], []
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if line.startswith("step "):
            times.append((time.perf_counter() - started, cpu_seconds(process.pid)))
    if process.wait() or len(times) != STEPS:
        raise ValueError(f"{' '.join(command)} failed:\n{''.join(output[-20:])}")
    wall, cpu = zip(*times, strict=True)
    return _less_a_step(wall), _less_a_step(cpu)


def _less_a_step(ends: Sequence[float]) -> float:
    return ends[0] - statistics.median(b - a for a, b in pairwise(ends))
