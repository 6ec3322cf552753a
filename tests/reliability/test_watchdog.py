import os
import subprocess
import sys
import time

import pytest
from helpers.training_process import command, run

from maxpipe.supervise import watchdog
from maxpipe.supervise.watchdog import HUNG, Watchdog

HANGS = """
import sys, time
from maxpipe.supervise.watchdog import Watchdog

def stuck_here(seconds):
    time.sleep(seconds)

startup, step, done = map(float, sys.argv[1:])
with Watchdog(startup, step) as watchdog:
    for n in range(int(done)):
        watchdog.progress(f"step {n + 1}")
    stuck_here(20)
"""

STEP_THREE_HANGS = """
import sys, time
from maxpipe import train
from maxpipe.training.trainer import SpmdTrainer

original, calls = SpmdTrainer.step, []

def step(self, state, batch):
    calls.append(None)
    if len(calls) == 3:
        time.sleep(600)
    return original(self, state, batch)

SpmdTrainer.step = step
sys.exit(train.main(sys.argv[1:]))
"""


def test_watchdog_hang_prints_stacks_and_exits_also_where_nothing_can_be_printed():
    def hang(*seconds, stderr):
        return subprocess.Popen([sys.executable, "-c", HANGS, *seconds], stderr=stderr, text=True)

    startup, step = (f"telemetry.{name}_deadline_seconds" for name in ("startup", "step"))
    cases = {
        ("0.3", "0", "0"): (startup, "the start"),
        ("0", "0.3", "2"): (step, "step 2"),
        ("60", "0.3", "2"): (step, "step 2"),
    }
    read, write = os.pipe()
    os.close(read)
    began = time.monotonic()
    unheard = hang("0.3", "0", "0", stderr=write)
    os.close(write)
    started = [hang(*seconds, stderr=subprocess.PIPE) for seconds in cases]
    for process, (key, since) in zip(started, cases.values(), strict=True):
        _, error = process.communicate(timeout=60)
        assert process.returncode == HUNG
        assert f"nothing has happened for 0.3 s since {since} ({key})" in error
        assert "in stuck_here" in error
    assert unheard.wait(60) == HUNG
    assert time.monotonic() - began < 19


@pytest.fixture
def expired(monkeypatch):
    """Return the list of expired watchdogs."""
    found = []
    monkeypatch.setattr(Watchdog, "_expire", lambda self, *why: found.append(why))
    return found


def test_watchdog_slow_start_is_not_a_hang(expired):
    with Watchdog(startup_seconds=60, step_seconds=0.05):
        time.sleep(0.3)
    assert expired == []


def test_watchdog_progress_resets_deadline(expired):
    with Watchdog(startup_seconds=60, step_seconds=1) as dog:
        for step in range(12):
            dog.progress(f"step {step}")
            time.sleep(0.1)
    assert expired == []


def test_watchdog_deadline_0_never_expires(expired):
    with Watchdog(startup_seconds=0.05, step_seconds=0) as dog:
        dog.progress("step 1")
        time.sleep(0.3)
    assert expired == []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(watchdog, "_HURRIED_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.02)


@pytest.mark.parametrize("deadline", [0, 60])
def test_watchdog_hurried_before_a_step_ends_a_hang_soon(expired, impatient, deadline):
    with Watchdog(deadline, deadline) as dog:
        dog.progress("step 1")
        dog.hurry()
        time.sleep(0.5)
    key, allowed = expired[0]
    assert key == "asked to stop"
    assert allowed == pytest.approx(0.2, abs=0.05)


def test_watchdog_hurried_in_a_long_step_gives_it_its_time_from_then_on(expired, impatient):
    with Watchdog(60, 60) as dog:
        dog.progress("step 1")
        dog._since -= 40  # a step that waits for its data
        dog.hurry()
        time.sleep(0.1)
        assert expired == []
        time.sleep(0.4)
    assert expired[0][1] == pytest.approx(40.2, abs=0.05)


@pytest.mark.parametrize("before_step", [False, None])
def test_watchdog_hurried_leaves_saves_and_the_first_step_their_deadline(
    expired, impatient, before_step
):
    with Watchdog(60, 60) as dog:
        if before_step is not None:
            dog.progress("step 1", before_step=before_step)
        dog.hurry()
        time.sleep(0.5)
    assert expired == []


def test_watchdog_hurried_gives_a_step_three_times_the_slowest_one(expired, impatient):
    with Watchdog(60, 60) as dog:
        dog.progress("step 1")
        time.sleep(0.3)
        dog.progress("step 2")
        dog.hurry()
        time.sleep(0.6)
    assert expired == []


def test_watchdog_of_half_an_hour_is_late_by_a_second_at_most(expired, monkeypatch):
    with Watchdog(1800, 1800) as dog:
        monkeypatch.setattr(dog, "_since", time.monotonic() - 1801)
        time.sleep(1.5)
    assert len(expired) >= 1


def test_watchdog_closed_never_expires(expired):
    with Watchdog(startup_seconds=0.1):
        pass
    time.sleep(0.3)
    assert expired == []


def test_train_hanging_step_exits_with_stack(tmp_path):
    words = command(tmp_path, "telemetry.step_deadline_seconds=3", "steps=9")
    code, output = run(tmp_path / "log", words, program=STEP_THREE_HANGS)
    assert code == HUNG, output
    assert "nothing has happened for 3 s since step 1 (telemetry.step_deadline_seconds)" in output
    assert "maxpipe/training/loop.py" in output
    assert "in train" in output
