"""A save that fails while other processes wait, and what libraries print about a failed one."""

import asyncio
import logging
import sys
from types import SimpleNamespace

import pytest

from maxpipe.checkpoint import orbax_writer
from maxpipe.checkpoint.orbax_writer import OrbaxWriter, leave_errors_to_the_caller
from maxpipe.checkpoint.policies import Retention
from maxpipe.config import CheckpointConfig


@pytest.fixture
def hooks(monkeypatch):
    """Return a list of the errors that Python is left to print."""
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(args.exc_value))
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    leave_errors_to_the_caller.__wrapped__()
    return printed


def late_error():
    """Return what asyncio raises for a result that comes after the event loop."""
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed") as caught:
        loop.call_soon_threadsafe(print)
    return caught.value


def report(error, trace):
    """Report an error in both ways that C++ has."""
    sys.excepthook(type(error), error, trace)
    sys.unraisablehook(SimpleNamespace(exc_value=error, exc_traceback=trace))


def test_results_after_the_event_loop_are_not_printed(hooks):
    error = late_error()
    trace = error.__traceback__
    while trace.tb_frame.f_code.co_name != "call_soon_threadsafe":
        trace = trace.tb_next
    report(error, trace)
    assert hooks == []


def test_other_errors_are_printed(hooks):
    error = late_error()
    report(error, error.__traceback__)  # it has frames of the program
    report(ValueError(), None)
    assert [type(error) for error in hooks] == [RuntimeError, RuntimeError, ValueError, ValueError]


class FailingManager:
    """Orbax's manager in one of two processes, which fails when it is asked for the third time."""

    def __init__(self, on_error, directory, **settings):
        self.on_error = on_error
        self.times_asked = 0

    def save(self, step, **arguments):
        pass

    def is_saving_in_progress(self):
        self.times_asked += 1
        if self.times_asked == 3:
            self.on_error(OSError("the disk is full"))
        return True  # as long as the other process waits for this one

    def wait_until_finished(self):
        raise AssertionError("this would wait for the other process")

    close = wait_until_finished


def test_wait_of_one_of_several_processes_raises_its_own_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_writer.processes, "count", lambda: 2)
    monkeypatch.setattr(orbax_writer, "_manager_class", lambda: FailingManager)
    monkeypatch.setattr(orbax_writer, "leave_errors_to_the_caller", lambda: None)
    settings = CheckpointConfig()
    writer = OrbaxWriter(tmp_path, Retention(settings, lambda step: None), lambda: None)
    writer.start(1, {}, {})
    assert writer.is_running
    with pytest.raises(OSError, match="the disk is full"):
        writer.wait()
    assert not writer.is_running
    writer.wait()  # the error is raised once
    writer.close()
