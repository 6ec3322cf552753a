"""The script that measures replicas prints what a step and a replica take."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "replicas.py"


@pytest.mark.slow
def test_replicas_ratio_is_that_of_its_parts():
    done = subprocess.run(
        [sys.executable, SCRIPT, "ratio", "--blocks=1", "--every=2"],
        capture_output=True,
        text=True,
        timeout=600,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("33 MB of state, a replica every 2 steps, 1 turns\n")
    times = [float(cpu) for cpu in re.findall(r"([\d.]+) ms CPU", done.stdout)]
    step, begin, write = times
    ratio = float(re.search(r"ratio +CPU ([\d.]+)", done.stdout)[1])
    assert ratio == pytest.approx(1 + (begin + write) / (2 * step), abs=1e-3)
