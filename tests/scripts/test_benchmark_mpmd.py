"""Test scripts/benchmark/mpmd.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "mpmd.py"


@pytest.mark.grid
@pytest.mark.parametrize("processes", [1, 2])
def test_benchmark_mpmd_prints_a_line_for_every_schedule(processes):
    words = ("--microbatches", "2", "--seconds", "0.001", "--schedules", "1f1b", "zb_v")
    words += ("--processes", str(processes))
    run = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    lines = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines[0].endswith(f"{processes} processes")
    rows = [line.split() for line in lines[2:]]
    assert [row[:2] for row in rows] == [["1f1b", "8"], ["zb_v", "24"]]
    # The CPU time of compiling, of each process.
    assert all(len(row[-4].split("/")) == processes for row in rows)
    assert all(re.fullmatch(r"[+-]\d+\.\d%", row[-1]) for row in rows)
