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


def test_results_after_the_event_loop_are_not_printed_and_other_errors_are(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(args.exc_value))
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    leave_errors_to_the_caller.__wrapped__()
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as late:
        loop.call_soon_threadsafe(print)
    other = ValueError()
    for error in (late.value, other):
        sys.excepthook(type(error), error, error.__traceback__)
        sys.unraisablehook(SimpleNamespace(exc_value=error, exc_traceback=error.__traceback__))
    assert printed == [other, other]


def test_wait_of_one_of_several_processes_raises_its_own_error_at_once(tmp_path, monkeypatch):
    asked = []

    def is_saving_in_progress():
        asked.append(True)
        if len(asked) == 3:
            writer._note_error(OSError("the disk is full"))
        return True  # as long as the other process waits for this one

    # Neither of its other methods may be called: they would wait for the other process.
    manager = SimpleNamespace(
        save=lambda step, **_: None, is_saving_in_progress=is_saving_in_progress
    )
    monkeypatch.setattr(orbax_writer.processes, "count", lambda: 2)
    monkeypatch.setattr(OrbaxWriter, "_make_manager", lambda self: manager)
    writer = OrbaxWriter(tmp_path, Retention(CheckpointConfig(), lambda step: None), lambda: None)
    assert not writer.is_open
    writer.start(1, {}, {})
    assert writer.is_open
    assert writer.is_running
    with pytest.raises(OSError, match="the disk is full"):
        writer.wait()
    assert not writer.is_running
    writer.wait()  # the error is raised once
    writer.close()
    assert not writer.is_open
