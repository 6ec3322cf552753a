"""Run the train command in this process, on a model of 62 thousand parameters."""

import contextlib
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.commands import exit_code
from maxpipe import train as command
from maxpipe.checkpoint.arrays import load
from maxpipe.checkpoint.record import step_record
from maxpipe.checkpoint.steps import StepsDirectory, committed_steps

REPOSITORY = Path(__file__).parents[2]

CONFIG = f"""\
base: {REPOSITORY}/configs/base.yml
run_name: tiny
model: {{embed_dim: 32, num_query_heads: 2, num_kv_heads: 2, mlp_dim: 64}}
data: {{sequence_length: 32, global_batch_size: 8}}
mesh: {{simulated_devices: 8, ici: {{fsdp: 4}}}}
"""


def write_config(directory: Path, **values: object) -> list[str]:
    """Write `directory`/tiny.yml, which runs in `directory`/runs; return a command's words."""
    file = directory / "tiny.yml"
    values = {"eval": "{every: 0}", "telemetry": "{log_every: 1}"} | values
    file.write_text(CONFIG + "".join(f"{key}: {value}\n" for key, value in values.items()))
    return [str(file), f"output_dir={directory / 'runs'}"]


def output_dir(words: list[str]) -> Path:
    return Path(words[-1].partition("=")[2])


def last_words(words: Iterable[str]) -> list[str]:
    """Return the words; of several `key=value` words for a key only the last."""
    last: dict[object, str] = {}
    for place, word in enumerate(words):
        setting = re.match(r"([a-z_.]+)=", word)
        last[setting[1] if setting else place] = word
    return [*last.values()]


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run(words: list[str]) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code(command.main, last_words(words))
    return Ended(code, out.getvalue(), err.getvalue())


def train(words: list[str], expected_code: int = 0) -> str:
    ended = run(words)
    assert ended.code == expected_code, ended
    return ended.out + ended.err


def rows(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def losses(root: Path) -> dict[int, tuple[float, float, float]]:
    """Return step -> (loss, gradient norm, learning rate); check that no step occurs twice."""
    steps = [row for row in rows(root) if "loss" in row]
    by_step = {row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"]) for row in steps}
    assert len(by_step) == len(steps)
    return by_step


def checkpoints(root: Path) -> list[int]:
    return committed_steps(root / "checkpoints")


def saved(root: Path, step: int) -> dict[str, np.ndarray]:
    """Load the arrays of a checkpoint by name, data position and random key included."""
    directory = StepsDirectory(root / "checkpoints").of(step)
    leaves = step_record(directory).leaves
    loaded = load(directory, leaves, dict.fromkeys(leaves))
    return {name: np.asarray(array) for name, array in loaded}


def assert_same_run(root: Path, other: Path, step: int) -> None:
    """Assert that both runs saved the same bits after `step` and logged the same losses."""
    arrays = saved(root, step)
    others = saved(other, step)
    assert arrays.keys() == others.keys()
    different = [name for name in arrays if arrays[name].tobytes() != others[name].tobytes()]
    assert not different
    assert losses(root) == losses(other)
    assert sorted(losses(root)) == list(range(1, step + 1))
