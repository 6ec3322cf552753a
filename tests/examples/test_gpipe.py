"""Test that the example learns."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "gpipe.py"


def test_gpipe_example_halves_its_loss():
    command = [sys.executable, SCRIPT, "--stages", "2", "--microbatches", "4", "--steps", "40"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
