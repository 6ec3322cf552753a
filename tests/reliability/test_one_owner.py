"""A second start of a run that is still alive, and the end of a run whose directory is lost."""

import json
import platform
import signal

import pytest
from helpers.training_process import TrainingProcess, command

from maxpipe import train

ALONE = ("mesh.simulated_devices=1", "mesh.ici.data=1", "mesh.ici.stage=1", "mesh.ici.fsdp=1")
HERE = ("mesh.simulated_devices=0", "mesh.ici.data=8")
ENDLESS = (*ALONE, "steps=100000", "checkpoint.every=100000")

LOOKS_OFTEN = """
import sys
from maxpipe.storage import lease
lease.RENEW_SECONDS = 0.2
from maxpipe import train
sys.exit(train.main(sys.argv[1:]))
"""


def test_train_second_start_is_refused_until_the_first_is_dead(tmp_path, monkeypatch, capsys):
    words = command(tmp_path, *ENDLESS)
    here = command(tmp_path, *ENDLESS, *HERE)
    lease = tmp_path / "base" / "lease.json"
    launched = {"MAXPIPE_JOB": "job", "MAXPIPE_ATTEMPT": "1"}
    with TrainingProcess(tmp_path / "first.log", words, launched) as first:
        first.wait_for("step      1/")
        with pytest.raises(SystemExit, match="2"):
            train.main([*here, "optimizer.learning_rate=1"])
        owner = json.loads(lease.read_text())
        assert (
            f"config error: run_name: {tmp_path}/base is in use by process {owner['pid']} on "
            f"{owner['host']} since {owner['since']}: wait until it has ended"
        ) in capsys.readouterr().err
        first.send(signal.SIGKILL)
        first.wait()
    assert lease.exists()
    # The next attempt is on another host.
    for name, value in (launched | {"MAXPIPE_ATTEMPT": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "other")
    assert train.main([*here, "stop_after=1"]) == 0
    printed = "".join(capsys.readouterr())
    assert "an earlier attempt of job job" in printed
    assert "to see whether that process lives" not in printed
    assert not lease.exists()


def test_train_lost_run_directory_ends_with_1(tmp_path):
    words = command(tmp_path / "runs", *ENDLESS)
    with TrainingProcess(tmp_path / "log", words, program=LOOKS_OFTEN) as process:
        process.wait_for("step      1/")
        (tmp_path / "runs" / "base").rename(tmp_path / "moved")
        assert process.wait() == 1
    assert "error: " in process.output
    assert f"{tmp_path}/runs/base was deleted or moved while this run" in process.output
    assert "done" not in process.output
    assert not (tmp_path / "runs" / "base").exists()
