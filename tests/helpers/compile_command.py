"""Run `python -m maxpipe.compile` as a process."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import last_words
from maxpipe.config import Config

ROOT = Path(__file__).parents[2]

tpu_aot = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed; pip install -e '.[tpu]'",
    ),
]


def run(
    *words: str | Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command from the repository root, with `environment` added to this process's."""
    command = [sys.executable, "-m", "maxpipe.compile", *last_words(map(str, words))]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )


def report_of(
    tmp_path: Path, *words: str | Path, code: int = 0, environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """Run the command to the exit code `code`; return its JSON report and what it printed."""
    file = tmp_path / "report.json"
    process = run(*words, "--json", file, environment=environment)
    assert process.returncode == code, process.stdout + process.stderr
    return json.loads(file.read_text()), process.stdout


# The compiler's passes that make a step quick take a third of its time. What is asserted of memory,
# or of what overlaps, needs them.
QUICK = {"JAX_OPTIMIZATION_LEVEL": "O0"}
# Sizes that keep the compile time short, which grows with widths, lengths, blocks and depth. Mesh
# axes, stages, heads of 128 and options remain the preset's.
NARROW = (
    "model.embed_dim=768",
    "model.mlp_dim=512",
    "model.num_query_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=1536",
    "data.sequence_length=128",
    "pipeline.num_repeats=1",
)


def narrow_preset(config: Config) -> list[str]:
    stages, latent = config.mesh.size("stage"), config.model.attention_kind == "mla"
    words = [w for w in NARROW if not (latent and w.startswith("model.num_kv_heads"))]
    if config.model.first_dense_layers:  # and one outside the pipeline of each kind
        one = f"model.num_layers={stages + 2}", f"pipeline.parallel_layers={stages}"
        return [*words, "model.first_dense_layers=1", *one]
    return [*words, f"model.num_layers={stages}"]
