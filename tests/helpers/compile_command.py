"""`python -m maxpipe.compile` as tests run it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

tpu_aot = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu is not installed; pip install -e '.[tpu]'",
    ),
]


def run(*words, environment=()):
    command = [sys.executable, "-m", "maxpipe.compile", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | dict(environment)
    )


def report_of(tmp_path, *words, code=0):
    file = tmp_path / "report.json"
    done = run(*words, "--json", file)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


# The compiler's time grows with widths, lengths and depth; axes, stages, heads of 128 and options
# stay the preset's.
NARROW = (
    "model.embed_dim=768",
    "model.mlp_dim=512",
    "model.num_query_heads=4",
    "model.num_kv_heads=2",
    "model.vocab_size=1536",
    "data.sequence_length=512",
    "pipeline.num_repeats=1",
)
