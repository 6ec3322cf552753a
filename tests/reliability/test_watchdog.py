import os
import subprocess
import sys
import time

import pytest
from helpers.training_process import command, run

from maxpipe.supervise import process as process_module
from maxpipe.supervise.process import HUNG, Watchdog

HANGS = """
import time
from maxpipe.supervise.process import Watchdog

with Watchdog(0.3):
    time.sleep(20)
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


def test_watchdog_ends_a_hang_also_where_nothing_can_be_printed():
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen([sys.executable, "-c", HANGS], stderr=write) as process:
        os.close(write)
        assert process.wait(19) == HUNG


START, STEP = (f"telemetry.{name}_deadline_seconds" for name in ("startup", "step"))


@pytest.mark.parametrize(
    ("limits", "acts", "reason"),
    [
        ((60, 1), [59], ""),
        ((60, 1), [61], f"60 s since the start ({START})"),
        ((60, 10), [59, "step 1", 9, "step 2", 9], ""),
        ((60, 10), [59, "step 1", 11], f"10 s since step 1 ({STEP})"),
        ((5, 0), [4, "step 1", 9999], ""),
        # Asked to stop, a step has 30 seconds, or three times the slowest one.
        ((60, 60), [1, "step 1", 1, "hurry", 29], ""),
        ((60, 60), [1, "step 1", 1, "hurry", 31], "31 s since step 1 (asked to stop)"),
        ((0, 0), [1, "step 1", 1, "hurry", 31], "31 s since step 1 (asked to stop)"),
        ((60, 60), [1, "step 1", 5, "hurry", 9, "hurry", 22], "35 s since step 1 (asked to stop)"),
        ((99, 99), [1, "step 1", 50, "hurry", 29], ""),  # a step that waits for its data
        ((99, 99), [1, "step 1", 50, "hurry", 31], "80 s since step 1 (asked to stop)"),
        ((99, 99), [50, "step 1", 12, "step 2", "hurry", 35], ""),
        ((99, 99), [50, "step 1", 12, "step 2", "hurry", 37], "36 s since step 2 (asked to stop)"),
        ((60, 60), ["hurry", 59], ""),
        ((60, 60), [1, "save", "hurry", 59], ""),
        ((60, 60), [1, "save", "hurry", 61], f"60 s since save ({STEP})"),
    ],
)
def test_watchdog_says_which_deadline_is_over(limits, acts, reason):
    now = 0.0
    dog = Watchdog(*limits, clock=lambda: now)
    for act in acts:
        if act == "hurry":
            dog.hurry()
        elif isinstance(act, str):
            dog.progress(act, before_step=act != "save")
        else:
            now += act
    assert dog.overdue() == (reason and f"nothing has happened for {reason}")


def test_watchdog_looks_every_second_until_it_is_closed(monkeypatch):
    left, looks = [], []
    monkeypatch.setattr(process_module, "leave", lambda *words: left.append(words))
    monkeypatch.setattr(Watchdog, "overdue", lambda self: looks.append(time.monotonic()))
    with Watchdog(0.1):
        time.sleep(1.5)
    seen = len(looks)
    assert seen >= 1
    time.sleep(1.5)
    assert (len(looks), left) == (seen, [])


def test_train_hanging_step_exits_with_stack(tmp_path):
    words = command(tmp_path, "telemetry.step_deadline_seconds=3", "steps=9")
    code, output = run(tmp_path / "log", words, program=STEP_THREE_HANGS)
    assert code == HUNG, output
    assert "nothing has happened for 3 s since step 1 (telemetry.step_deadline_seconds)" in output
    assert "maxpipe/training/loop.py" in output
    assert "in train" in output
