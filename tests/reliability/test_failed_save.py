"""A save that fails says so on one line and leaves within seconds, whatever libraries do.

Their threads print hundreds of lines of tracebacks, and wait for minutes.
"""

import time

import pytest
from helpers.runs import checkpoints
from helpers.training_process import TrainingProcess, command

NO_ROOM_FOR_DIRECTORIES = """
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

NO_ROOM_FOR_ARRAYS = """
import resource
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.supervise.ending import run_command
from maxpipe.train import main

save = Checkpointer.save

def save_to_small_files(self, step, *words, **options):
    if step == 2:
        self.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, 32_000))
    return save(self, step, *words, **options)

Checkpointer.save = save_to_small_files
run_command(main)
"""


@pytest.mark.parametrize(
    ("program", "reason", "remedy"),
    [
        (NO_ROOM_FOR_DIRECTORIES, "No space left on device", "lower checkpoint.keep"),
        pytest.param(NO_ROOM_FOR_ARRAYS, "File too large", "", marks=pytest.mark.slow),
    ],
    ids=["directories", "arrays"],
)
def test_train_failed_save_is_one_message_that_names_safe_steps(tmp_path, program, reason, remedy):
    words = command(tmp_path, "mesh.simulated_devices=1", "mesh.ici.stage=1", "mesh.ici.data=1")
    words += ["mesh.ici.fsdp=1", "steps=2", "checkpoint.every=1"]
    with TrainingProcess(tmp_path / "log", words, {"JAX_NUM_CPU_DEVICES": "1"}, program) as process:
        process.wait_for("error: saving checkpoint")
        failed_at = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - failed_at < 10
    errors = process.output[process.output.index("\nstep 2/2") :].splitlines()
    (message,) = (line for line in errors if line.startswith("error: "))
    assert f"saving checkpoint {tmp_path}/base/checkpoints/2 failed: {reason}" in message
    assert f"; safe: step 1 in {tmp_path}/base/checkpoints" in message
    assert remedy in message
    assert len(errors) <= 6, process.output
    assert "Traceback" not in process.output
    assert checkpoints(tmp_path / "base") == [1]
    assert not (tmp_path / "base" / "lease.json").exists()
