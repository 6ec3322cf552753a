"""Ways to end that have no file of their own: 0, 1 and 2.

42 is in test_bad_numbers, 75 in test_resume, 130 in test_signals, 124 in test_watchdog, 134 in
tests/multiprocess.
"""

import errno

import pytest
from helpers.runs import checkpoints
from helpers.training_process import train_here

from maxpipe.telemetry.writers import MetricsFile

pytestmark = pytest.mark.usefixtures("compiled_once")


def main(tmp_path, *words):
    return train_here(tmp_path, "steps=2", *words)


def test_train_finished_run_exits_with_0_again(tmp_path, capsys):
    assert main(tmp_path) == 0
    assert "done: 2 steps" in capsys.readouterr().out.splitlines()[-1]
    assert main(tmp_path) == 0
    assert "nothing to do" in capsys.readouterr().out.splitlines()[-1]


def test_train_stop_after_exits_with_0_and_with_1_once_all_checkpoints_are_damaged(
    tmp_path, capsys
):
    assert main(tmp_path, "stop_after=1") == 0
    assert "stopped after step 1 of 2 (stop_after)" in capsys.readouterr().out.splitlines()[-1]
    assert checkpoints(tmp_path / "base") == [1]
    for file in (tmp_path / "base" / "checkpoints" / "1" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert main(tmp_path) == 1
    ended = capsys.readouterr()
    assert "none of its steps can be loaded" in ended.err
    assert "to start from scratch delete it or choose another run_name" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("required", ["false", "true"])
def test_train_telemetry_that_cannot_be_written_exits_with_1_where_it_is_required(
    tmp_path, capsys, required
):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tensorboard").write_text("in the way")
    words = ("checkpoint.every=2", f"telemetry.required={required}")
    is_required = required == "true"
    assert main(tmp_path, *words) == is_required
    ended = capsys.readouterr()
    shown = f"{tmp_path}/base/tensorboard cannot be written: "
    lines = (ended.err if is_required else ended.out).splitlines()
    (line,) = (line for line in lines if shown in line)
    assert line.startswith("error: " if is_required else "warning: ")
    assert checkpoints(tmp_path / "base") == ([] if is_required else [2])
    assert ("done: 2 steps" in ended.out) is not is_required


def test_train_required_metrics_that_fail_later_exit_with_1_and_the_reason(
    tmp_path, capsys, monkeypatch
):
    def full(self, row):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", full)
    assert main(tmp_path, "telemetry.required=true") == 1
    ended = capsys.readouterr()
    reason = "metrics.jsonl cannot be written: No space left on device (telemetry.required)"
    assert ended.err.splitlines() == [f"error: {tmp_path}/base/{reason}"]
    assert "done" not in ended.out
    assert not (tmp_path / "base" / "lease.json").exists()


def test_train_bad_configuration_exits_with_2(tmp_path, capsys):
    assert main(tmp_path, "optimizer.learning_rate=-1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("config error: optimizer.learning_rate")
    assert lines[-1] == "1 problem found"
