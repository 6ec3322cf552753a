"""The example's gradients are those of the plain function, and it learns."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "own_model_mpmd.py"


def test_own_model_mpmd_example_on_stages_of_different_sizes_halves_its_loss():
    words = ["--schedule", "zb_h1", "--devices-per-stage", "2", "1", "1", "--steps", "60"]
    printed = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    differences = re.findall(r"^largest difference of .*: (.+)$", printed, re.MULTILINE)
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-5
    assert re.search(r"^stage 0 \(devices: 2\) has shared$", printed, re.MULTILINE)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
