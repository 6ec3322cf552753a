"""Ways to end that have no file of their own: 0, 1 and 2.

42 is in test_bad_numbers, 75 in test_resume, 130 in test_signals, 124 in test_watchdog, 134 in
tests/multiprocess.
"""

import errno
import time

from helpers.runs import checkpoints
from helpers.training_process import TrainingProcess, command, train_here

from maxpipe.telemetry.writers import MetricsFile


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


NO_ROOM = """
import errno, os
from maxpipe.supervise.ending import run_command
from maxpipe.train import main

mkdir = os.mkdir

def refuse(path, *words, **options):
    if "2.orbax-checkpoint-tmp" in os.fspath(path):
        raise OSError(errno.ENOSPC, "No space left on device", os.fspath(path))
    mkdir(path, *words, **options)

os.mkdir = refuse
run_command(main)
"""


def test_train_failed_save_is_one_message_that_names_safe_steps(tmp_path):
    """Threads of libraries print hundreds of lines of tracebacks, and wait for minutes."""
    words = command(tmp_path, "mesh.simulated_devices=1", "mesh.ici.stage=1", "mesh.ici.data=1")
    words += ["mesh.ici.fsdp=1", "steps=2", "checkpoint.every=1"]
    with TrainingProcess(tmp_path / "log", words, {"JAX_NUM_CPU_DEVICES": "1"}, NO_ROOM) as process:
        process.wait_for("error: saving checkpoint")
        failed_at = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - failed_at < 10
    errors = process.output[process.output.index("\nstep 2/2") :].splitlines()
    (message,) = (line for line in errors if line.startswith("error: "))
    failed = f"saving checkpoint {tmp_path}/base/checkpoints/2 failed: No space left on device"
    assert failed in message
    assert f"; safe: step 1 in {tmp_path}/base/checkpoints" in message
    assert "lower checkpoint.keep" in message
    assert len(errors) <= 6, process.output
    assert "Traceback" not in process.output
    assert checkpoints(tmp_path / "base") == [1]
    assert not (tmp_path / "base" / "lease.json").exists()
