"""Test scripts/benchmark/read_weights.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "read_weights.py"


def figures(*words):
    """Run the script; return MiB of the parameters, of what was needed besides, of a tensor."""
    run = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    pattern = r"parameters (\d+) MiB, besides (-?\d+) MiB, largest tensor (\d+) MiB, .* s\n"
    return [int(number) for number in re.fullmatch(pattern, run.stdout).groups()]


# An MLP's parameter of all layers is larger than the largest tensor, which is the embedding.
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        pytest.param(("--layers=24", "--width=512"), (509, 62), marks=pytest.mark.slow),
        pytest.param(("--layers=32", "--vocabulary=16000"), (2173, 62), marks=pytest.mark.grid),
    ],
    ids=["509 MiB", "more than 2 GiB"],
)
def test_reading_weights_takes_less_than_two_of_the_largest_tensors_besides_them(
    words, sizes, dtype
):
    size, besides, largest = figures(*words, f"--dtype={dtype}")
    assert (size, largest) == sizes
    assert besides <= 2 * largest
