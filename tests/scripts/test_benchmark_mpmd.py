"""Test scripts/benchmark/mpmd.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "mpmd.py"


@pytest.mark.grid
def test_benchmark_mpmd_prints_a_line_for_every_schedule():
    words = ("--microbatches", "2", "--seconds", "0.001", "--schedules", "1f1b", "zb_v")
    run = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in run.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["1f1b", "8"], ["zb_v", "24"]]
    assert all(re.fullmatch(r"[+-]\d+\.\d%", row[-1]) for row in rows)
