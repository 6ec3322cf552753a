"""Test scripts/benchmark/read_weights.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "read_weights.py"


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_weights_takes_less_than_two_of_the_largest_tensors_besides_them():
    """A parameter of all layers has 384 MiB, the embedding 62."""
    words = ("--layers", "24", "--width", "1024", "--vocabulary", "16000")
    run = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    pattern = r"parameters (\d+) MiB, besides (-?\d+) MiB, largest tensor (\d+) MiB, .* s\n"
    size, besides, largest = map(int, re.fullmatch(pattern, run.stdout).groups())
    assert (size, largest) == (1661, 62)
    assert besides <= 2 * largest
