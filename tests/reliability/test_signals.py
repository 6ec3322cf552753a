import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxpipe.supervise import ending
from maxpipe.supervise.ending import INTERRUPTED, PREEMPTED, Interruption

WAITS = """
import time
from maxpipe.supervise.ending import Interruption

with Interruption(lambda: print("asked", flush=True)) as interruption:
    interruption.begin()
    print("ready", flush=True)
    time.sleep(60)
"""


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def ended(monkeypatch):
    codes = []
    monkeypatch.setattr(ending.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, INTERRUPTED)]
)
def test_signal_requests_stop_after_step(number, code, ended, capfd):
    with Interruption() as interruption:
        interruption.begin()
        assert not interruption.after(3)
        os.kill(os.getpid(), number)
        wait_until(lambda: interruption.after(3))
        assert interruption.exit_code == code
    assert ended == []
    assert f"{number.name}: finishing the step and saving" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGINT, signal.SIGTERM), INTERRUPTED),
        ((signal.SIGTERM, signal.SIGINT), INTERRUPTED),
        ((signal.SIGTERM, signal.SIGTERM), PREEMPTED),
    ],
)
def test_signal_second_ctrl_c_exits_at_once(numbers, code, ended, monkeypatch):
    said = []
    monkeypatch.setattr(ending, "_print", said.append)
    with Interruption() as interruption:
        interruption.begin()
        for count, number in enumerate(numbers, 1):
            os.kill(os.getpid(), number)
            wait_until(lambda count=count: len(said) == count)
        assert ended == []
        assert interruption.exit_code == code


def test_signals_end_a_process_that_cannot_print():
    """Its writes fail, as those to the pipe of a `tee` that Ctrl-C has ended."""
    read, broken = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=broken, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == INTERRUPTED


@pytest.mark.parametrize("ends_process", [True, False])
def test_signal_asks_for_one_trace_and_for_nothing_else(ends_process, ended, capfd):
    with Interruption(ends_process=ends_process) as interruption:
        assert not interruption.take_trace_request()
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(interruption.take_trace_request)
        assert not interruption.take_trace_request()
        assert not interruption.after(3)
    assert ended == []
    assert "SIGUSR2: the next steps are traced" in capfd.readouterr().err


def test_signal_handlers_and_threads_are_removed_on_exit():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = [signal.getsignal(n) for n in numbers]
    with Interruption():
        assert [signal.getsignal(n) for n in numbers] != before
    assert [signal.getsignal(n) for n in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    wait_until(lambda: all(thread.name != "signals" for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signal_in_a_program_stops_the_run_or_raises(number, error, ended):
    before = signal.getsignal(number)
    with Interruption(ends_process=False) as interruption:
        with pytest.raises(error):
            signal.raise_signal(number)
        interruption.begin()
        signal.raise_signal(number)
        assert interruption.after(3)
        if number == signal.SIGINT:
            with pytest.raises(error):
                signal.raise_signal(number)
    assert ended == []
    assert signal.getsignal(number) == before
