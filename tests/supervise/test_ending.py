"""Leaving a process at once: last acts, flushed streams, and threads that never end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from maxpipe.config.terminal import at_end
from maxpipe.supervise import ending
from maxpipe.supervise.ending import run_command
from maxpipe.supervise.signals import Interruption

IMPORT = """
from maxpipe.config.terminal import at_end
from maxpipe.supervise.ending import leave, run_command
"""
WITH_A_THREAD_THAT_NEVER_ENDS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
with at_end(lambda: print("first registered")), at_end({second}):
    print("no newline", end=" ")
    leave(42)
"""


def run(code):
    """Run code in a process whose output is buffered; return exit code, output and errors."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys\n{IMPORT}\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


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
    assert run(code)[:2] == (42, printed)


def test_leave_flushes_what_was_printed_and_does_not_repeat_last_acts():
    code = """
with at_end(lambda: print("once")): pass
sys.stderr = None  # a service may have none
with at_end(lambda: print("act")):
    print("printed")
    leave(42)
"""
    assert run(code) == (42, "once\nprinted\nact\n", "")


@pytest.fixture
def left(monkeypatch):
    """Codes with which the process was to leave at once."""
    codes = []

    def leave(code):
        codes.append(code)
        raise SystemExit("left")

    monkeypatch.setattr(ending, "leave", leave)
    return codes


def end_with(code):
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("main", "printed"),
    [(lambda: 1, ""), (lambda: end_with(1), ""), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_run_command_that_failed_leaves_at_once(left, capsys, main, printed):
    with pytest.raises(SystemExit, match="left"):
        run_command(main)
    assert left == [1]
    assert bool(printed) == bool(shown := capsys.readouterr().err)
    assert printed in shown


def test_run_command_leaves_a_thread_behind_that_pythons_exit_would_disturb():
    code = """
import atexit, threading, time
from maxpipe.supervise.ending import leave_behind
atexit.register(print, "python's exit")
thread = threading.Thread(target=time.sleep, args=({seconds},), daemon=True)
thread.start()
leave_behind(thread)
{wait}
run_command(lambda: 75)
"""
    assert run(code.format(seconds=600, wait="")) == (75, "", "")
    ended = code.format(seconds=0, wait="thread.join()")
    assert run(ended) == (75, "python's exit\n", "")


def test_run_command_of_one_of_several_passes_an_error_on(left, monkeypatch):
    monkeypatch.setattr(ending, "is_one_of_several", lambda: True)
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 / 0)
    assert left == []


@pytest.mark.parametrize("code", [0, 2, 42, 75])
def test_run_command_that_did_not_fail_takes_pythons_exit(left, code):
    for main in (lambda: code, lambda: end_with(code)):
        with pytest.raises(SystemExit) as end:
            run_command(main)
        assert end.value.code == code
    assert left == []


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
