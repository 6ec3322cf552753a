"""A second start of a run that is still alive, and the end of a run whose directory is lost."""

import json
import platform
import signal

import pytest
from helpers.training_process import TrainingProcess, command, train_here

from maxpipe import train
from maxpipe.storage import lease
from maxpipe.training.batches import BatchPlacer

ALONE = ("mesh.simulated_devices=1", "mesh.ici.data=1", "mesh.ici.stage=1", "mesh.ici.fsdp=1")
HERE = ("mesh.simulated_devices=0", "mesh.ici.data=8")
ENDLESS = (*ALONE, "steps=100000", "checkpoint.every=100000")


def test_train_second_start_is_refused_until_the_first_is_dead(tmp_path, monkeypatch, capsys):
    words = command(tmp_path, *ENDLESS)
    here = command(tmp_path, *ENDLESS, *HERE)
    file = tmp_path / "base" / "lease.json"
    launched = {"MAXPIPE_JOB": "job", "MAXPIPE_ATTEMPT": "1"}
    with TrainingProcess(tmp_path / "first.log", words, launched) as first:
        first.wait_for("step      1/")
        with pytest.raises(SystemExit, match="2"):
            train.main([*here, "optimizer.learning_rate=1"])
        owner = json.loads(file.read_text())
        assert (
            f"config error: run_name: {tmp_path}/base is in use by process {owner['pid']} on "
            f"{owner['host']} since {owner['since']}: wait until it has ended"
        ) in capsys.readouterr().err
        first.send(signal.SIGKILL)
        first.wait()
    assert file.exists()
    # The next attempt is on another host.
    for name, value in (launched | {"MAXPIPE_ATTEMPT": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "node", lambda: "other")
    assert train.main([*here, "stop_after=1"]) == 0
    printed = "".join(capsys.readouterr())
    assert "an earlier attempt of job job" in printed
    assert "to see whether that process lives" not in printed
    assert not file.exists()


def test_train_lost_run_directory_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    original, calls = BatchPlacer.__call__, []

    def call(self, batch):
        calls.append(None)
        if len(calls) == 3:
            (tmp_path / "base").rename(tmp_path / "moved")
        return original(self, batch)

    monkeypatch.setattr(BatchPlacer, "__call__", call)
    assert train_here(tmp_path, "steps=100000", "checkpoint.every=100000") == 1
    said = capsys.readouterr()
    assert f"error: {tmp_path}/base was deleted or moved while this run" in said.err
    assert "done" not in said.out
    assert not (tmp_path / "base").exists()
