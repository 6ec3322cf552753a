"""Leaving a process at once: last acts, flushed streams, and threads that never end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from maxpipe.supervision.ending import at_end
from maxpipe.supervision.signals import Interruption

WITH_A_THREAD_THAT_NEVER_ENDS = """
import sys, threading, time
from maxpipe.supervision.ending import at_end, leave
threading.Thread(target=time.sleep, args=(600,)).start()
with at_end(lambda: print("first registered")), at_end({second}):
    print("no newline", end=" ")
    leave(42)
"""


@pytest.mark.parametrize(
    ("second", "printed"),
    [
        ("lambda: print('second')", "no newline second\nfirst registered\n"),
        ("lambda: 1 / 0", "no newline first registered\n"),
        ("lambda: time.sleep(600)", "no newline "),
    ],
)
def test_leave_ends_with_code_after_last_acts(second, printed):
    code = WITH_A_THREAD_THAT_NEVER_ENDS.format(second=second)
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (42, printed)


def test_at_end_acts_once_also_after_an_error():
    acts = []
    with pytest.raises(ZeroDivisionError), at_end(lambda: acts.append(1)):
        _ = 1 / 0
    assert acts == [1]


def test_signal_before_the_first_step_calls_last_acts(tmp_path):
    release = tmp_path / "released"
    process = os.fork()
    if process == 0:
        with Interruption(), at_end(release.touch):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    assert release.exists()
