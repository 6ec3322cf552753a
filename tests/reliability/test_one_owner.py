"""A second start of a run that is still alive, and the end of a run whose directory is lost."""

import json
import shutil
import signal

import pytest
from helpers.training_process import TrainingProcess, command, run

HERE = ("mesh.simulated_devices=1", "mesh.ici.data=1", "mesh.ici.stage=1", "mesh.ici.fsdp=1")
ENDLESS = (*HERE, "steps=100000", "checkpoint.every=100000")

ON_ANOTHER_HOST = """
import platform, sys
platform.node = lambda: "other"
from maxpipe import train
sys.exit(train.main(sys.argv[1:]))
"""

LOOKS_OFTEN = """
import sys
from maxpipe.storage import lease
lease.RENEW_SECONDS = 0.2
from maxpipe import train
sys.exit(train.main(sys.argv[1:]))
"""


def test_train_second_start_is_refused_until_the_first_is_dead(tmp_path):
    words = command(tmp_path, *ENDLESS)
    lease = tmp_path / "base" / "lease.json"
    launched = {"MAXPIPE_JOB": "job", "MAXPIPE_ATTEMPT": "1"}
    with TrainingProcess(tmp_path / "first.log", words, launched) as first:
        first.wait_for("step      1/")
        code, output = run(tmp_path / "second.log", [*words, "optimizer.learning_rate=1"])
        assert code == 2, output
        owner = json.loads(lease.read_text())
        assert (
            f"config error: run_name: {tmp_path}/base is in use by process {owner['pid']} on "
            f"{owner['host']} since {owner['since']}: wait until it has ended" in output
        )
        first.send(signal.SIGKILL)
        first.wait()
    assert lease.exists()
    launched["MAXPIPE_ATTEMPT"] = "2"
    words.append("stop_after=1")
    code, output = run(tmp_path / "third.log", words, launched, ON_ANOTHER_HOST)
    assert code == 0, output
    assert "an earlier attempt of job job" in output
    assert "to see whether that process lives" not in output
    assert not lease.exists()


def remove(directory):
    """Remove a directory into which a run still writes."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("is_moved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_train_lost_run_directory_ends_with_1(tmp_path, is_moved):
    words = command(tmp_path / "runs", *ENDLESS)
    with TrainingProcess(tmp_path / "log", words, program=LOOKS_OFTEN) as process:
        process.wait_for("step      1/")
        if is_moved:
            (tmp_path / "runs" / "base").rename(tmp_path / "moved")
        else:
            remove(tmp_path / "runs")
        assert process.wait() == 1
    assert "error: " in process.output
    assert f"{tmp_path}/runs/base was deleted or moved while this run" in process.output
    assert "done" not in process.output
    assert not (tmp_path / "runs" / "base").exists()
