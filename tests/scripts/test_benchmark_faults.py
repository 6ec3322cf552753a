"""Random faults leave no trace in supervised runs, and the script that injects them can tell."""

import json
import re
import subprocess
import sys

import pytest
from helpers.scripts import SCRIPTS, load_script

report = load_script("benchmark/fault_report")


def inject(directory, words):
    flags = re.findall(r"--.*?(?= --|$)", words)  # kinds of faults have spaces
    command = [sys.executable, SCRIPTS / "benchmark" / "faults.py", f"--directory={directory}"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            "--faults=3 --processes=2 --steps=400 --deadline=60 --seed=1 "
            "--kinds=SIGKILL,damaged checkpoint,lost memory",
            ["  SIGKILL, process ", "  damaged checkpoint, process ", "  lost memory, process "],
            marks=pytest.mark.slow,
        ),
        pytest.param("--faults=10 --processes=4 --deadline=40", [], marks=pytest.mark.grid),
        pytest.param(
            "--elastic --faults=3 --processes=2 --deadline=60 --seed=3 --per-run=3 "
            "--kinds=lost host,SIGKILL",
            ["\nlost host "],
            marks=pytest.mark.grid,
        ),
    ],
)
def test_faults_leave_the_bits_or_losses_of_an_undisturbed_run(tmp_path, words, said):
    printed = inject(tmp_path / "runs", words)
    assert all(text in printed for text in said)
    count = re.search(r"faults=(\d+)", words)[1]
    assert printed.splitlines()[-1].startswith(f"sound: {count} faults in 1 runs, seed")
    assert not [*(tmp_path / "runs").glob("run-*")], "a sound run is kept"


def test_loss_differences_tells_lost_repeated_and_other_steps(tmp_path):
    def write(name, losses):
        (tmp_path / name).mkdir(exist_ok=True)
        rows = [{"step": 1, "loss": 2.5}, *({"step": 2, "loss": loss} for loss in losses)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / name

    whole, endless = write("whole", [2.25]), float("inf")
    not_once, last = "metrics.jsonl has not every step once", "losses differ from step 2 on"
    for losses, resized, problems in [
        ([2.25], endless, []),
        ([], endless, [not_once]),
        ([2.25, 2.25], endless, [not_once]),
        ([2.250001], endless, [last]),
        # Once the mesh has changed, rounding differs.
        ([2.25 * (1 + 5e-6)], 1, []),
        ([2.25 * (1 + 5e-5)], 1, [last]),
        ([2.25 * (1 + 5e-6)], 2, [last]),
    ]:
        assert report.loss_differences(whole, write("other", losses), 2, resized) == problems
