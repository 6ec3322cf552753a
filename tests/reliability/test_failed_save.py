"""A save that fails says so on one line and leaves within seconds, whatever libraries do.

Their threads print hundreds of lines of tracebacks, and wait for minutes.
"""

import time

from helpers.runs import checkpoints
from helpers.training_process import TrainingProcess, command

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
