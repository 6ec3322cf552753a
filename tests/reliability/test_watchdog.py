import sys
import time

import pytest
from helpers.training_process import command, run

from maxpipe.supervise import process
from maxpipe.supervise.process import HUNG, Watchdog

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


START, STEP = (f"telemetry.{name}_deadline_seconds" for name in ("startup", "step"))


@pytest.mark.parametrize(
    ("limits", "acts", "reason"),
    [
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
        ((99, 99), [50, "step 1", 12, "step 2", "hurry", 35], ""),
        ((99, 99), [50, "step 1", 12, "step 2", "hurry", 37], "36 s since step 2 (asked to stop)"),
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


class Broken:
    def write(self, text):
        raise BrokenPipeError


def test_watchdog_looks_until_it_is_closed_and_ends_a_hang_that_it_cannot_print(monkeypatch):
    codes = []
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(process, "leave", lambda *words: codes.append(words))
    monkeypatch.setattr(Watchdog, "overdue", lambda self: "hangs")
    monkeypatch.setattr(sys, "__stderr__", Broken())
    with process.running(Watchdog(0.1).watch, "watchdog"):
        time.sleep(0.5)
    time.sleep(0.1)
    seen = len(codes)
    time.sleep(0.2)
    assert codes == [(HUNG, "hangs")] * seen
    assert seen > 1


def test_train_hanging_step_exits_with_stack(tmp_path):
    words = command(tmp_path, "telemetry.step_deadline_seconds=3", "steps=9")
    code, output = run(tmp_path / "log", words, program=STEP_THREE_HANGS)
    assert code == HUNG, output
    assert "nothing has happened for 3 s since step 1 (telemetry.step_deadline_seconds)" in output
    assert "maxpipe/training/loop.py" in output
    assert "in train" in output
