import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import CheckpointConfig

SAVER = Path(__file__).with_name("save_forever.py")
ROWS = 1 << 20


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.grid)])
def test_nothing_committed_is_lost_by_kill_during_saves(directory, rounds):
    import jax

    target = {
        "large": jax.ShapeDtypeStruct((ROWS,), np.int32),
        "host": jax.ShapeDtypeStruct((ROWS,), np.int64),
    }
    draw = random.Random(rounds)
    newest = 0
    for _ in range(rounds):
        newest = max(newest, kill_while_saving(directory, draw.uniform(0.0, 0.5)))
        said = []
        checkpointer = Checkpointer(directory, CheckpointConfig(keep=2), say=said.append)
        restored = checkpointer.restore(target)
        assert said == []
        assert restored.step >= newest
        newest = restored.step
        assert np.array_equal(restored.state["large"], np.arange(ROWS, dtype=np.int32) * np.int32(newest))
        assert np.array_equal(restored.state["host"], np.full(ROWS, newest))
        assert np.array_equal(restored.iterator, np.full((2, 3), newest))
        assert restored.meta == {"step": newest}


def kill_while_saving(directory, delay):
    """Kills the saver `delay` seconds after its first commits; returns the last one it reported."""
    process = subprocess.Popen([sys.executable, SAVER, directory], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            assert process.stdout.readline().startswith("committed")
        time.sleep(delay)
    finally:
        process.kill()
        rest = process.communicate()[0]
    return max((int(line.split()[1]) for line in rest.splitlines() if len(line.split()) == 2), default=0)
