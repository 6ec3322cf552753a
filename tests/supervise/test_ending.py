"""Leaving a process at once: last acts, flushed streams, and threads that never end."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxpipe.config.terminal import at_end
from maxpipe.supervise import ending
from maxpipe.supervise.ending import Interruption, run_command

HANGS = """
import threading, time
from maxpipe.config.terminal import at_end
from maxpipe.supervise.ending import leave

threading.Thread(target=time.sleep, args=(600,)).start()
with at_end(lambda: time.sleep(600)):
    print("no newline", end=" ")
    leave(42)
"""


def test_leave_ends_a_process_whatever_hangs():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", HANGS]
    ended = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (42, "no newline ", "")


def test_leave_flushes_around_last_acts_which_are_not_repeated(monkeypatch):
    codes, out = [], io.StringIO()
    monkeypatch.setattr(ending.os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)  # a service may have none
    monkeypatch.setattr(out, "flush", lambda: out.write("|"), raising=False)
    with at_end(lambda: out.write("once")):
        pass
    with at_end(lambda: out.write("first")), at_end(lambda: 1 / 0), at_end(lambda: out.write("3")):
        out.write("printed")
        ending.leave(42)
    assert codes == [42]
    assert out.getvalue() == "onceprinted|3||first|"


@pytest.fixture
def left(monkeypatch):
    """Codes with which the process was to leave at once."""
    codes = []

    def leave(code):
        codes.append(code)
        raise SystemExit("left")

    monkeypatch.setattr(ending, "leave", leave)
    return codes


@pytest.mark.parametrize("code", [0, 1, 2, 42, 75])
def test_run_command_leaves_at_once_after_a_failure_alone(left, code):
    for main in (lambda: code, lambda: sys.exit(code)):
        with pytest.raises(SystemExit, match="left" if code == 1 else f"^{code}$"):
            run_command(main)
    assert left == ([1, 1] if code == 1 else [])


def test_run_command_shows_an_error_and_leaves_with_1(left, capsys):
    with pytest.raises(SystemExit, match="left"):
        run_command(lambda: 1 / 0)
    assert left == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_run_command_leaves_a_thread_behind_that_pythons_exit_would_disturb(left, monkeypatch):
    monkeypatch.setattr(ending, "left_behind", [])
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait, args=(60,))
    thread.start()
    ending.left_behind.append(thread)
    with pytest.raises(SystemExit, match="left"):
        run_command(lambda: 75)
    goes_on.set()
    thread.join()
    with pytest.raises(SystemExit, match="75"):
        run_command(lambda: 75)
    assert left == [75]


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
