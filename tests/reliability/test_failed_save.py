"""A save that fails leaves threads of libraries that wait for minutes; the process does not."""

import time

from helpers.training_process import TrainingProcess, command

NO_ROOM_FOR_DIRECTORIES = """
import errno, os
from maxpipe.supervision.ending import run_command
from maxpipe.train import main

mkdir = os.mkdir

def refuse(path, *words, **options):
    if "orbax-checkpoint-tmp" in os.fspath(path):
        raise OSError(errno.ENOSPC, "No space left on device", os.fspath(path))
    mkdir(path, *words, **options)

os.mkdir = refuse
run_command(main)
"""


def test_train_failed_save_leaves_within_seconds(tmp_path):
    words = command(tmp_path, "mesh.simulated_devices=1", "mesh.ici.stage=1", "mesh.ici.data=1")
    words += ["mesh.ici.fsdp=1", "steps=2"]
    with TrainingProcess(
        tmp_path / "log", words, {"JAX_NUM_CPU_DEVICES": "1"}, NO_ROOM_FOR_DIRECTORIES
    ) as process:
        process.wait_for("error: saving checkpoint")
        failed_at = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - failed_at < 10
    assert "No space left on device" in process.output
    assert not (tmp_path / "base" / "lease.json").exists()
