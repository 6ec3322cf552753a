"""Runs of the train command as real processes, on a model of 62 thousand parameters."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from maxpipe.checkpoint.arrays import load
from maxpipe.checkpoint.record import read_record
from maxpipe.checkpoint.steps import committed_steps, step_path

REPOSITORY = Path(__file__).parents[2]

CONFIG = f"""\
base: {REPOSITORY}/configs/base.yml
run_name: tiny
model: {{embed_dim: 32, num_query_heads: 2, num_kv_heads: 2, mlp_dim: 64}}
data: {{sequence_length: 32, global_batch_size: 8}}
"""


def write_config(directory: Path, **values: object) -> list[str]:
    """The words of a command: a configuration file in `directory`, and its runs in `directory`/runs."""
    file = directory / "tiny.yml"
    values = {"eval": "{every: 0}", "telemetry": "{log_every: 1}"} | values
    file.write_text(CONFIG + "".join(f"{key}: {value}\n" for key, value in values.items()))
    return [str(file), f"output_dir={directory / 'runs'}"]


def output_dir(words: list[str]) -> Path:
    """Where the command of `write_config` puts its runs."""
    return Path(words[-1].partition("=")[2])


def run(words: list[str]) -> subprocess.CompletedProcess:
    """Runs the command to its end."""
    command = [sys.executable, "-m", "maxpipe.train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def train(words: list[str], expected_code: int = 0) -> str:
    """Runs the command, checks its exit code and returns what it printed."""
    process = run(words)
    assert process.returncode == expected_code, process.stdout + process.stderr
    return process.stdout + process.stderr


def rows(root: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def losses(root: Path) -> dict[int, tuple[float, float, float]]:
    """Step -> loss, gradient norm and learning rate; every step occurs once."""
    steps = [row for row in rows(root) if "loss" in row]
    found = {row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"]) for row in steps}
    assert len(found) == len(steps)
    return found


def checkpoints(root: Path) -> list[int]:
    return committed_steps(root / "checkpoints")


def saved(root: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name: parameters, moments, counters, key and data position."""
    directory = step_path(root / "checkpoints", step)
    leaves = read_record(directory).leaves
    return dict(load(directory, leaves, dict.fromkeys(leaves)))


def assert_same_run(root: Path, other: Path, step: int) -> None:
    """Both runs saved the same bits after `step` and have the same losses up to it."""
    ours, theirs = saved(root, step), saved(other, step)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    assert not different
    assert losses(root) == losses(other)
    assert sorted(losses(root)) == list(range(1, step + 1))
