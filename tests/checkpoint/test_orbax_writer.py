"""What libraries print about a failed save."""

import asyncio
import logging
import sys
from types import SimpleNamespace

import pytest

from maxpipe.checkpoint.orbax_writer import leave_errors_to_the_caller


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
