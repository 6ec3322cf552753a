"""Test scripts/benchmark/mpmd.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "mpmd.py"


@pytest.mark.grid
@pytest.mark.parametrize("processes", [1, 2])
def test_benchmark_mpmd_prints_a_line_for_every_schedule_and_writes_traces(tmp_path, processes):
    words = ("--microbatches", "2", "--seconds", "0.001", "--schedules", "1f1b", "zb_v")
    words += ("--processes", str(processes), "--trace", str(tmp_path))
    run = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    lines = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines[0].endswith(f"{processes} processes")
    rows = [line.split() for line in lines[2::2]]
    assert [row[:2] for row in rows] == [["1f1b", "8"], ["zb_v", "24"]]
    # The CPU time of compiling, of each process.
    assert all(len(row[-4].split("/")) == processes for row in rows)
    assert all(re.fullmatch(r"[+-]\d+\.\d%", row[-1]) for row in rows)
    for name, line, units, transfers in zip(
        ("1f1b", "zb_v"), lines[3::2], (8, 24), (4, 8), strict=True
    ):
        pattern = r"  (\d+) transfers to a stage with nothing to do.*; (\d+) to one that computed"
        assert sum(map(int, re.match(pattern, line).groups())) == transfers
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        kinds = [event["tid"] for event in events]
        assert (kinds.count("units"), kinds.count("arrivals")) == (units, transfers)
