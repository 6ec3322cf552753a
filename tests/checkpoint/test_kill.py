import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import CheckpointConfig

SAVER = Path(__file__).with_name("save_forever.py")
ROWS = 1 << 20


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.grid)])
def test_kill_during_saves_loses_no_committed_step(directory, rounds):
    draw, newest = random.Random(rounds), 0
    target = {
        name: jax.ShapeDtypeStruct((ROWS,), dtype)
        for name, dtype in (("large", np.int32), ("host", np.int64))
    }
    for _ in range(rounds):
        newest = max(newest, kill_while_saving(draw.uniform(0.0, 0.5), directory))
        checkpointer = Checkpointer(directory, CheckpointConfig(keep=2), log=pytest.fail)
        restored = checkpointer.restore(target)
        step = restored.step
        assert step >= newest
        large = np.arange(ROWS, dtype=np.int32) * np.int32(step)
        assert np.array_equal(restored.state["large"], large)
        assert np.array_equal(restored.state["host"], np.full(ROWS, step))
        assert np.array_equal(restored.iterator, np.full((2, 3), step))
        assert restored.meta == {"step": step}
        newest = step


def kill_while_saving(delay, directory):
    """Kill the saver `delay` seconds after its first commits; return the last step it reported."""
    process = subprocess.Popen(
        [sys.executable, SAVER, directory], stdout=subprocess.PIPE, text=True
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
