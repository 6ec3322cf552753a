import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import open_url
from maxpipe.config import CheckpointConfig

SAVER = Path(__file__).with_name("save_forever.py")
ROWS = 1 << 20


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.grid)])
def test_kill_during_saves_loses_no_committed_step(directory, rounds):
    draw = random.Random(rounds)
    newest = 0
    for _ in range(rounds):
        newest = max(newest, kill_while_saving(draw.uniform(0.0, 0.5), directory))
        checkpointer = Checkpointer(directory, CheckpointConfig(keep=2), log=pytest.fail)
        newest = restore(checkpointer, newest)


@pytest.mark.grid
def test_kill_and_lost_disk_lose_no_mirrored_step(directory, mirror_url):
    newest = 0
    for _ in range(10):
        newest = max(newest, kill_while_saving(random.uniform(0.0, 1.0), directory, mirror_url))
        shutil.rmtree(directory)
        checkpointer = Checkpointer(
            directory, CheckpointConfig(keep=2), mirror=open_url(mirror_url, "URL")
        )
        newest = restore(checkpointer, newest)
        shutil.rmtree(directory)


def restore(checkpointer, newest):
    """Restore and check the newest step, which is at least `newest`; return its number."""
    import jax

    dtypes = {"large": np.int32, "host": np.int64}
    restored = checkpointer.restore(
        {name: jax.ShapeDtypeStruct((ROWS,), dtype) for name, dtype in dtypes.items()}
    )
    step = restored.step
    assert step >= newest
    assert np.array_equal(restored.state["large"], np.arange(ROWS, dtype=np.int32) * np.int32(step))
    assert np.array_equal(restored.state["host"], np.full(ROWS, step))
    assert np.array_equal(restored.iterator, np.full((2, 3), step))
    assert restored.meta == {"step": step}
    return step


def kill_while_saving(delay, *arguments):
    """Kill the saver `delay` seconds after its first commits; return the last step it reported."""
    process = subprocess.Popen(
        [sys.executable, SAVER, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("committed")
        time.sleep(delay)
    finally:
        process.kill()
        rest = process.communicate()[0]
    return max(
        (int(line.split()[1]) for line in rest.splitlines() if len(line.split()) == 2), default=0
    )
