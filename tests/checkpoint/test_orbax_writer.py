"""What libraries print about a save that has failed."""

import asyncio
import logging
import sys
from types import SimpleNamespace

import pytest

from maxpipe.checkpoint.orbax_writer import leave_errors_to_the_caller


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
