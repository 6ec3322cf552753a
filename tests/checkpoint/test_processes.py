"""A checkpointer whose process is killed, and two that save and restore together."""

import os
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
from maxpipe.devices.cluster import free_port

MEMBER = Path(__file__).with_name("two_processes.py")
SAVER = Path(__file__).with_name("save_forever.py")
ROWS = 1 << 20


def run_both(*arguments):
    address = f"localhost:{free_port()}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    members = [
        subprocess.Popen(
            [sys.executable, MEMBER, address, str(index), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    deadline = time.monotonic() + 120
    # If one fails, the other one would wait for it.
    while {m.poll() for m in members} in ({None}, {None, 0}) and time.monotonic() < deadline:
        time.sleep(0.1)
    for member in members:
        member.kill()
    outputs = [member.communicate()[0] for member in members]
    assert all("done" in output for output in outputs), "\n".join(outputs)
    assert [member.returncode for member in members] == [0, 0]


def test_checkpointer_two_processes_save_restore_and_fall_back_together(directory):
    run_both(directory)
    target = {
        name: jax.ShapeDtypeStruct((8, 6), np.float32) for name in ("split", "copied", "host")
    }
    alone = Checkpointer(directory, CheckpointConfig(every=1, keep=2)).restore(target)
    assert alone.step == 2
    assert alone.iterator.tolist() == (np.arange(12).reshape(4, 3) + 2 * 2**40).tolist()


@pytest.mark.grid
def test_checkpointer_two_processes_without_directory_restore_from_mirror(directory, mirror_url):
    run_both(directory, mirror_url)


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
